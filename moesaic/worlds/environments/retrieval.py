"""Answer from local text by searching it, with the reward split into process and outcome (RAG-Gym).

environment: {name: retrieval, path: docs, turns: 3}
rewards: [{name: exact}, {name: process, by: mean, weight: 0.3}]

A search scores 1 if it brought up the right answer for the first time, a half if it found something new, and 0 if it
showed only what was known, or was no proper call. The outcome is whatever the other rewards make of the last turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from moesaic.serve.parsers import Message
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.environments.tool_use import CALLS, carried_out, opened, specs
from moesaic.worlds.example import Example
from moesaic.worlds.tools.search import Search


@dataclass(frozen=True)
class Retrieval(Environment):
    path: str = ""
    passages: int = 2
    instructions: str = "Search before you answer."

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError("retrieval needs at least one turn")
        Search(self.path, self.passages)  # refuses what it cannot search

    def begin(self, example: Example) -> Episode:
        tools = {"search": self.search}
        return RetrievalEpisode(opened(example, self.instructions), specs(tools), self.search, example.truth or "")

    @cached_property
    def search(self) -> Search:
        return Search(self.path, self.passages)


@dataclass
class RetrievalEpisode(Episode):
    search: Search
    truth: str
    known: set[str] = field(default_factory=set)  # passages that were shown

    def step(self, said: Message) -> Step:
        if not said.calls:
            return Step(done=True)
        shown, score = [], 0.0
        for call in said.calls[:CALLS]:
            text, fine = carried_out({"search": self.search}, call)
            shown.append({"role": "tool", "content": text})
            score = max(score, self._score(text) if fine else 0.0)
        return Step(shown, score=score)

    def _score(self, text: str) -> float:
        found = {part for part in text.split("\n\n") if part != "(nothing was found)"}
        new, held = found - self.known, any(self._holds(part) for part in self.known)
        self.known |= found
        if any(self._holds(part) for part in new) and not held:
            return 1.0
        return 0.5 if new else 0.0

    def _holds(self, passage: str) -> bool:
        return bool(self.truth) and self.truth.casefold() in passage.casefold()
