"""Tool calls that a grammar forced (`tool_choice` required, or one tool by name), which need no tags."""

from __future__ import annotations

import re

from moesaic.serve.parsers import CallArguments, CallEnded, CallStarted, Content, Event, EventReader

CALL_HEAD = re.compile(r'[\[,]\s*\{"name": "([^"]*)", "parameters": ')


class NamedCallReader:
    """All the text is the arguments of one call."""

    state = "call"

    def __init__(self, name: str) -> None:
        self.name = name
        self.started = False

    def push(self, text: str) -> list[Event]:
        events: list[Event] = [] if self.started else [CallStarted(0, self.name)]
        self.started = True
        return [*events, CallArguments(0, text)]

    def finish(self) -> list[Event]:
        return [CallEnded(0)]


class CallListReader:
    """`[{"name": ..., "parameters": ...}, ...]`, as the grammar has it. The arguments of a call end where a brace
    closes that they did not open."""

    state = "call"

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
                head = CALL_HEAD.match(self.pending)
                if head is None:
                    break
                self.call += 1
                self.inside, self.pending = True, self.pending[head.end() :]
                events.append(CallStarted(self.call, head[1]))
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
        for place, character in enumerate(self.pending):
            if self.quoted:
                self.quoted = self.escaped or character != '"'
                self.escaped = character == "\\" and not self.escaped
            elif character == '"':
                self.quoted = True
            elif character in "[{":
                self.depth += 1
            elif character in "]}":
                if self.depth == 0:
                    return place
                self.depth -= 1
        return None


class AfterReasoning:
    """A reasoning section, and then what another reader reads."""

    def __init__(self, reasoning: EventReader, inner: EventReader) -> None:
        self.reasoning, self.inner = reasoning, inner
        self.state = reasoning.state

    def push(self, text: str) -> list[Event]:
        return self._passed_on(self.reasoning.push(text))

    def finish(self) -> list[Event]:
        return [*self._passed_on(self.reasoning.finish()), *self.inner.finish()]

    def _passed_on(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self.inner.push(event.text) if isinstance(event, Content) else [event]
        self.state = self.inner.state if self.reasoning.state == "content" else self.reasoning.state
        return found
