"""What Ollama's API writes: one JSON object a line, the last with counts and durations in nanoseconds."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import RootModel

from moesaic.serve.api.chat import Chat, ChoiceBuilder
from moesaic.serve.api.completions import Completions
from moesaic.serve.api.errors import ApiError, ollama_form
from moesaic.serve.api.logprobs import Shown
from moesaic.serve.api.ollama.schema import ChatRequest, GenerateRequest, GeneratingRequest
from moesaic.serve.api.ollama.translation import (
    as_chat,
    field_name,
    generate_as_chat,
    generate_as_completion,
)
from moesaic.serve.api.schema.chat import ChatTokenLogprob
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import Generation, Outputs
from moesaic.serve.api.timings import timings
from moesaic.serve.core.request import Output, Request, TooLong
from moesaic.serve.parsers import CallArguments, CallBroken, CallEnded, CallStarted, Content, Event, Reasoning

MILLISECOND = 1_000_000  # in nanoseconds


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def durations(request: Request) -> dict[str, int]:
    took = timings([request])
    prompt, generated = int(took.prompt_ms * MILLISECOND), int(took.predicted_ms * MILLISECOND)
    return {
        "total_duration": prompt + generated,
        "load_duration": 0,  # it was loaded when the server began
        "prompt_eval_count": len(request.prompt),
        "prompt_eval_duration": prompt,
        "eval_count": request.written,
        "eval_duration": generated,
    }


class Calls:
    """Tool calls as they are complete: Ollama sends whole ones, with their arguments as an object."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.arguments: dict[int, str] = {}
        self.sent = 0

    def push(self, events: Sequence[Event], ids: dict[int, str]) -> list[dict[str, Any]]:
        found = []
        for event in events:
            match event:
                case CallStarted(call, name):
                    self.names[call], self.arguments[call] = name, ""
                case CallArguments(call, text) if call in self.names:
                    self.arguments[call] += text
                case CallBroken(call):
                    self.names.pop(call, None)
                case CallEnded(call) if call in self.names:
                    found.append(self._whole(call, ids))
        return found

    def _whole(self, call: int, ids: dict[int, str]) -> dict[str, Any]:
        try:
            arguments = json.loads(self.arguments[call] or "{}")
        except ValueError:
            arguments = {}
        number, self.sent = self.sent, self.sent + 1
        function = {"index": number, "name": self.names[call], "arguments": arguments}
        return {"id": ids.get(call), "function": function}


class Lines(Generation):
    """Text that is sent as lines of JSON."""

    id_prefix = ""
    ending = ""  # the last line says done: true
    media_type = "application/x-ndjson"

    def failed(self, error: ApiError) -> str:
        return line(ollama_form(error.status, error.body.error))

    async def events(self, outputs: Outputs) -> AsyncIterator[str]:
        async for batch in outputs.batches():
            if lines := [line(part) for output in batch for part in self.take(output)]:
                yield "".join(lines)


class Reply(Lines):
    """A chat whose one choice is written as Ollama writes it."""

    def __init__(self, service: Service, body: GeneratingRequest, chat: Chat) -> None:
        super().__init__(service, body, chat.requests)
        self.choice: ChoiceBuilder = next(iter(chat.choices.values()))
        self.calls = Calls()
        self.content, self.thinking = "", ""
        self.tool_calls: list[dict[str, Any]] = []
        self.logprobs: list[dict[str, Any]] = []

    @classmethod
    def prepare(cls, service: Service, body: ChatRequest, salt: str) -> Reply:
        return cls(service, body, that_fits(body, lambda some: Chat.prepare(service, as_chat(service, some), salt)))

    @staticmethod
    def field_name(place: str) -> str:
        return field_name(Chat.field_name(place))

    def push(self, output: Output) -> list[dict[str, Any]]:
        events, tokens = self.choice.push(output)
        text = "".join(event.text for event in events if isinstance(event, Content))
        thinking = "".join(event.text for event in events if isinstance(event, Reasoning))
        calls = self.calls.push(events, self.choice.call_ids)
        logprobs = [logprob(token) for token in tokens]
        self.content += text
        self.thinking += thinking
        self.tool_calls += calls
        self.logprobs += logprobs
        lines = [self.part(text, thinking, calls, logprobs)] if text or thinking or calls or logprobs else []
        if output.finish_reason is not None:
            lines.append(self.part("", "", [], []) | self.end(output.request))
        return lines

    def response(self) -> RootModel[dict[str, Any]]:
        whole = self.part(self.content, self.thinking, self.tool_calls, self.logprobs) | self.end(self.requests[0])
        return RootModel(whole)

    def part(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return self.head() | {"message": message, "done": False} | ({"logprobs": logprobs} if logprobs else {})

    def head(self) -> dict[str, Any]:
        return {"model": self.body.model, "created_at": now()}

    def end(self, request: Request) -> dict[str, Any]:
        reason = "length" if request.finish_reason == "length" else "stop"
        return {"done": True, "done_reason": reason, **durations(request)}


def that_fits(body: ChatRequest, prepare: Callable[[ChatRequest], Chat]) -> Chat:
    """The chat of all messages; where they are too long, without as many of the oldest turns as it takes. A turn begins
    with the user's message, and what the system says stays."""
    try:
        return prepare(body)
    except TooLong:
        if body.truncate is False:
            raise
    system = [message for message in body.messages if message.role.lower() == "system"]
    starts = [number for number, message in enumerate(body.messages) if message.role.lower() == "user"][1:]
    found: Chat | None = None
    while starts:
        middle = len(starts) // 2
        rest = [message for message in body.messages[starts[middle] :] if message.role.lower() != "system"]
        try:
            found = prepare(body.model_copy(update={"messages": [*system, *rest]}))
            starts = starts[:middle]  # perhaps fewer need go
        except TooLong:
            starts = starts[middle + 1 :]
    return found if found is not None else prepare(body)


class Generated(Reply):
    """The same for /api/generate, with the model's chat template."""

    @classmethod
    def prepare(cls, service: Service, body: GenerateRequest, salt: str) -> Reply:  # type: ignore[override]
        chat = Chat.prepare(service, generate_as_chat(service, body), salt, before=body.context or ())
        return cls(service, body, chat)

    @staticmethod
    def field_name(place: str) -> str:
        return {"messages": "prompt"}.get(place, Reply.field_name(place))

    def part(
        self, text: str, thinking: str, calls: list[dict[str, Any]], logprobs: list[dict[str, Any]]
    ) -> dict[str, Any]:
        found = self.head() | {"response": text, "done": False}
        found |= {"thinking": thinking} if thinking else {}
        found |= {"tool_calls": calls} if calls else {}
        return found | ({"logprobs": logprobs} if logprobs else {})

    def end(self, request: Request) -> dict[str, Any]:
        return super().end(request) | {"context": list(request.tokens)}


class RawGenerated(Lines):
    """/api/generate without a template: raw, or between a prompt and a suffix."""

    def __init__(self, service: Service, body: GenerateRequest, completions: Completions) -> None:
        super().__init__(service, body, completions.requests)
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []

    @classmethod
    def prepare(cls, service: Service, body: GenerateRequest, salt: str) -> RawGenerated:
        return cls(service, body, Completions.prepare(service, generate_as_completion(service, body), salt))

    @staticmethod
    def field_name(place: str) -> str:
        return field_name(Completions.field_name(place))

    def push(self, output: Output) -> list[dict[str, Any]]:
        decoder, shown = self.service.token_decoder, Shown(self.body.top_logprobs or 0)
        found = [logprob(decoder.logprob(one, shown)) for one in output.logprobs] if self.body.logprobs else []
        self.text += output.text
        self.logprobs += found
        lines = [self._part(output.text, found)] if output.text or found else []
        if output.finish_reason is not None:
            lines.append(self._end(output.request, "", []))
        return lines

    def response(self) -> RootModel[dict[str, Any]]:
        return RootModel(self._end(self.requests[0], self.text, self.logprobs))

    def _part(self, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"model": self.body.model, "created_at": now(), "response": text, "done": False}
        return head | ({"logprobs": logprobs} if logprobs else {})

    def _end(self, request: Request, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        reason = "length" if request.finish_reason == "length" else "stop"
        return self._part(text, logprobs) | {"done": True, "done_reason": reason, **durations(request)}


def logprob(token: ChatTokenLogprob) -> dict[str, Any]:
    found = token.model_dump(exclude={"top_logprobs"})
    top = [one.model_dump() for one in token.top_logprobs]
    return found | ({"top_logprobs": top} if top else {})


def line(content: dict[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False) + "\n"
