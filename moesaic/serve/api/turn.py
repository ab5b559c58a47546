"""One answer of a chat, as it comes: text taken apart into what it says, thinks and calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moesaic.serve.api.schema.chat import Called, CalledFunction, ChatChoice, ChoiceLogprobs, Said, TokenInfo
from moesaic.serve.api.service import new_id
from moesaic.serve.api.tokens_as_text import TokenTexts
from moesaic.serve.api.tools import EventReader
from moesaic.serve.core.request import Output
from moesaic.serve.parsers import CallArguments, CallBegan, CallBroken, CallEnded, Content, Event, Reasoning, collect
from moesaic.serve.parsers._reader import Reader


@dataclass
class Turn:
    """`top` likeliest tokens are reported with each token; None: no log-probabilities are wanted. Of the calls, those
    after the first are left out where they are not to be `parallel`."""

    index: int
    reader: EventReader
    texts: TokenTexts
    top: int | None
    parallel: bool = True
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenInfo] = field(default_factory=list)
    ids: dict[int, str] = field(default_factory=dict)  # of calls
    broken: set[int] = field(default_factory=set)  # those of them that were none; a stream may have told of them
    whole: int | None = None  # the first call that has ended
    thought: int = 0  # tokens
    finish_reason: str | None = None

    def push(self, output: Output) -> tuple[list[Event], list[TokenInfo]]:
        """What an output adds."""
        events = self.reader.push(output.text) if output.text else []
        if isinstance(self.reader, Reader) and self.reader.state == "reasoning":
            self.thought += len(output.tokens)
        if output.finish_reason is not None:
            events += self.reader.finish()
        if not self.parallel:
            events = [event for event in events if self._is_first(event)]
        for event in events:
            match event:
                case CallBegan(call, _):
                    self.ids[call] = new_id("call_")
                case CallBroken(call):
                    self.broken.add(call)
        infos = [self.texts.info(one, self.top) for one in output.logprobs] if self.top is not None else []
        self.events += events
        self.logprobs += infos
        if output.finish_reason is not None:
            called = self.ids.keys() - self.broken
            self.finish_reason = "tool_calls" if output.finish_reason == "stop" and called else output.finish_reason
        return events, infos

    def _is_first(self, event: Event) -> bool:
        """Whether an event is not one of a call after one that has ended."""
        if isinstance(event, CallEnded) and self.whole is None:
            self.whole = event.call
        return isinstance(event, Content | Reasoning) or self.whole is None or event.call <= self.whole

    def choice(self) -> ChatChoice:
        """The whole of it."""
        message = collect(self.events)
        ids = [name for number, name in self.ids.items() if number not in self.broken]
        calls = [
            Called(id=name, function=CalledFunction(name=call.name, arguments=call.arguments))
            for name, call in zip(ids, message.calls, strict=True)
        ]
        return ChatChoice(
            index=self.index,
            message=Said(
                content=message.content or (None if calls else ""),
                reasoning_content=message.reasoning or None,
                tool_calls=calls or None,
            ),
            logprobs=ChoiceLogprobs(content=self.logprobs) if self.top is not None else None,
            finish_reason=self.finish_reason or "stop",
        )

    def delta(self, events: list[Event]) -> dict[str, Any]:
        """Some events as the change a stream tells."""
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallBegan(call, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"index": call, "id": self.ids[call], "type": "function", "function": function})
                case CallArguments(call, text):
                    calls.append({"index": call, "function": {"arguments": text}})
        if calls:
            delta["tool_calls"] = calls
        return delta
