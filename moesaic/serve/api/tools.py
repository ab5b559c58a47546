"""Calls a client insists on (`tool_choice` required, or one tool by name): by grammar, so that they cannot fail."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from moesaic.errors import UserError
from moesaic.serve.api.schema.chat import ChatRequest, Function, NamedTool
from moesaic.serve.api.structure import checked_schema
from moesaic.serve.core.grammar import WHITESPACE, Grammar
from moesaic.serve.parsers import CallArguments, CallBegan, CallEnded, Event

SPACES = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
HEAD = re.compile(r'[\[,]\s*\{"name": "([^"]*)", "parameters": ')


# Of a tool that names none.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def schema_of(tool: Function) -> dict[str, Any]:
    """Of its arguments, which are an object, whether it says so or not."""
    return {"type": "object"} | (tool.parameters or NO_PARAMETERS)


def parameters_of(number: int) -> str:
    return f"tools.{number}.function.parameters"


class EventReader(Protocol):
    """Text in, what it means out."""

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]: ...


def forced_tools(form: ChatRequest) -> list[Function]:
    """The tools of which one must be called; none if the model may decide, or there is nothing to call."""
    tools = [tool.function for tool in form.tools or ()]
    for number, tool in enumerate(tools):
        if schema_of(tool)["type"] != "object":
            raise UserError(parameters_of(number), 'must have "type": "object": a call names what it gives')
    if form.tool_choice in (None, "none", "auto"):
        return []
    if not tools:
        raise UserError("tool_choice", "there are no tools to choose from", "Give tools.")
    if isinstance(form.tool_choice, NamedTool):
        name = form.tool_choice.function.name
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise UserError("tool_choice", f"there is no tool {name!r}")
    return tools


def call_grammar(form: ChatRequest, tools: Sequence[Function]) -> Grammar:
    """The arguments of one tool that was named, or a list of calls of any of them."""
    alone = [
        Grammar.json(checked_schema(schema_of(tool.function), place), place)
        for number, tool in enumerate(form.tools or ())
        if tool.function in tools and (place := parameters_of(number))
    ]
    if isinstance(form.tool_choice, NamedTool):
        return alone[0]
    more = "" if form.parallel_tool_calls is False else ' (", " call)*'
    lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "parameters": ')
        schema = json.dumps(SPACES | schema_of(tool), ensure_ascii=False)
        lines += [f'call_{number}: {head} parameters_{number} "}}"', f"parameters_{number}: %json {schema}"]
    return Grammar.lark("\n".join(lines), "tools")


class NamedReader:
    """All the text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.began = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = [] if self.began else [CallBegan(0, self.name)]
        self.began = True
        return [*events, CallArguments(0, text)]

    def finish(self) -> list[Event]:
        return [CallEnded(0)]


class ListReader:
    """`[{"name": ..., "parameters": ...}, ...]`, as the grammar has it. The arguments of a call end where a brace
    closes that they did not open."""

    def __init__(self) -> None:
        self.pending = ""
        self.call = -1
        self.inside = False
        self.depth, self.quoted, self.escaped = 0, False, False

    def push(self, text: str) -> list[Event]:
        self.pending += text
        events: list[Event] = []
        while self.pending:
            if not self.inside:
                head = HEAD.match(self.pending)
                if head is None:
                    break
                self.call += 1
                self.inside, self.pending = True, self.pending[head.end() :]
                events.append(CallBegan(self.call, head[1]))
            end = self._end()
            arguments = self.pending if end is None else self.pending[:end]
            if arguments:
                events.append(CallArguments(self.call, arguments))
            if end is None:
                self.pending = ""
            else:
                self.inside, self.pending = False, self.pending[end + 1 :]
                events.append(CallEnded(self.call))
        return events

    def finish(self) -> list[Event]:
        return []

    def _end(self) -> int | None:
        """Where in the pending text the arguments end, if they do."""
        for place, sign in enumerate(self.pending):
            if self.quoted:
                self.quoted = self.escaped or sign != '"'
                self.escaped = sign == "\\" and not self.escaped
            elif sign == '"':
                self.quoted = True
            elif sign in "[{":
                self.depth += 1
            elif sign in "]}":
                if self.depth == 0:
                    return place
                self.depth -= 1
        return None
