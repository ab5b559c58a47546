"""Tools to call before answering: every call is carried out and its result shown; a turn without calls is the answer.

environment: {name: tool_use, tools: [python, {name: search, path: docs}], turns: 4}
rewards: [{name: task}, {name: process, by: mean, weight: 0.2}]

The score of a turn (process reward) is the share of its calls that went well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moesaic.methods import build, named
from moesaic.serve.parsers import Call, Message
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.example import Example
from moesaic.worlds.tools import Tool

CALLS = 4  # of one turn that are carried out; a model that stammers does not keep the others waiting


@dataclass(frozen=True)
class ToolUse(Environment):
    tools: tuple[dict[str, Any] | str, ...] = ("python",)
    instructions: str = ""  # said by the system, before the question

    def __post_init__(self) -> None:
        if not self.tools or self.turns < 1:
            raise ValueError("tool_use needs at least one tool and one turn")
        build_tools(self.tools)  # what is wrong with them is said before anything runs

    def begin(self, example: Example) -> Episode:
        return ToolEpisode(opened(example, self.instructions), specs(self.built), self.built)

    @cached_property
    def built(self) -> dict[str, Tool]:
        return build_tools(self.tools)


@dataclass
class ToolEpisode(Episode):
    using: Mapping[str, Tool]

    def step(self, said: Message) -> Step:
        if not said.calls:
            return Step(done=True)
        results = [carried_out(self.using, call) for call in said.calls[:CALLS]]
        shown = [{"role": "tool", "content": text} for text, _ in results]
        return Step(shown, score=sum(fine for _, fine in results) / len(said.calls))


def carried_out(tools: Mapping[str, Tool], call: Call) -> tuple[str, bool]:
    """What a call gives, and whether it was a call that could be made."""
    try:
        arguments = json.loads(call.arguments or "{}")
        if call.name not in tools:
            raise ValueError(f"there is no {call.name}; there is {', '.join(tools)}")
        return tools[call.name](**arguments), True
    except (ValueError, TypeError) as error:
        return f"error: {error}", False


def build_tools(tools: tuple[dict[str, Any] | str, ...]) -> dict[str, Tool]:
    return {method.name: build(method, Tool, "align.stages: environment: tools") for method in named(tools)}


def specs(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    return [tool.spec(name) for name, tool in tools.items()]


def opened(example: Example, instructions: str) -> list[dict[str, Any]]:
    return [*([{"role": "system", "content": instructions}] if instructions else []), *map(dict, example.messages)]
