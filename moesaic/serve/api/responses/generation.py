"""A chat whose one choice is sent as the items of a response, whole or as events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from pydantic import BaseModel, TypeAdapter

from moesaic.errors import UserError
from moesaic.serve.api.chat import Chat, ChoiceBuilder
from moesaic.serve.api.conversation import conversation
from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.know.sources import Sources, file_citation
from moesaic.serve.api.responses.items import ItemBuilder
from moesaic.serve.api.responses.listing import listed_input
from moesaic.serve.api.responses.store import Stored
from moesaic.serve.api.responses.translate import ENCRYPTED, RESULTS, as_chat, responses_field
from moesaic.serve.api.schema.responses import (
    InputDetails,
    InputItem,
    InputTokens,
    OutputDetails,
    PromptFields,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
)
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import Generation, Outputs, event
from moesaic.serve.core.request import Output, TooLong

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class Responses(Generation):
    """`ended` is how it ended where the model had no part in it: failed, or cancelled."""

    id_prefix = "resp_"
    ending = ""  # the last event is response.completed, response.incomplete or response.failed

    def __init__(self, service: Service, body: ResponsesRequest, chat: Chat) -> None:
        super().__init__(service, body, chat.requests)
        self.chat = chat
        self.choice: ChoiceBuilder = next(iter(chat.choices.values()))
        self.items = ItemBuilder(packed=ENCRYPTED in (body.include or ()))
        self.stored = service.responses.enabled and body.store is not False
        self.queued = bool(body.background)
        self.ended: str | None = None
        self.error: dict[str, str] | None = None
        self.completed: int | None = None
        self.number = -1  # of the last event
        self.sources: Sources | None = chat.sources
        self.searched: list[dict[str, Any]] = []  # events of the search, which was over before anything was streamed
        if self.sources is not None:
            self.searched = self.items.search(self.sources, results=RESULTS in (body.include or ()))

    @classmethod
    def prepare(cls, service: Service, body: ResponsesRequest, salt: str) -> Responses:
        check_input(body)
        before = earlier_items(body)
        if body.truncation != "auto":
            return cls(service, body, Chat.prepare(service, as_chat(body, before), salt))
        return cls(service, body, _shortened(service, body, before, salt))

    @staticmethod
    def field_name(place: str) -> str:
        return responses_field(Chat.field_name(place))

    def heavy(self, output: Output) -> bool:
        return self.chat.heavy(output)

    def push(self, output: Output) -> list[dict[str, Any]]:
        """The events to stream."""
        events, logprobs = self.choice.push(output)
        streamed = self.items.push(events, [token.model_dump() for token in logprobs])
        if output.finish_reason is not None:
            if self.sources is not None:
                passages = self.sources.passages
                self.items.annotate([file_citation(one, passages[one.number - 1]) for one in self.choice.citations])
            streamed += self.items.finish(output.finish_reason != "length")
            self.completed = int(time.time())
        return streamed

    async def collect(self, outputs: Outputs) -> BaseModel | bytes:
        response = await super().collect(outputs)
        self._keep(response)
        return response

    async def events(self, outputs: Outputs) -> AsyncIterator[str]:
        async for events in self.numbered(outputs):
            if events:
                yield "".join(events)

    async def numbered(self, outputs: Outputs) -> AsyncIterator[list[str]]:
        """The events of the stream, each with its number."""
        yield [self._told("response.created"), self._told(f"response.{self.status}")]
        if self.searched:
            yield [self._event(data) for data in self.searched]
        async for batch in outputs.batches():
            news = [self._told("response.in_progress")] if self._begins() else []
            for output in batch:
                news += await self.beside(self._told_of, output)
            yield news
        if not self.body.background:
            self._keep(self.response())  # before its client hears that it may come back
        yield [self._told(f"response.{self.status}")]

    def failed(self, error: ApiError) -> str:
        self.ended, self.completed = "failed", int(time.time())
        self.error = {"code": "invalid_prompt" if error.status == 400 else "server_error", "message": str(error)}
        self.items.finish(False)
        return self._told("response.failed")

    def cancel(self) -> None:
        if self.status in ("queued", "in_progress"):
            self.ended, self.completed = "cancelled", int(time.time())
            self.items.finish(False)

    def _begins(self) -> bool:
        """Whether it waited until now."""
        queued, self.queued = self.queued, False
        return queued

    def _told_of(self, output: Output) -> list[str]:
        return [self._event(data) for data in self.take(output)]

    def _event(self, data: dict[str, Any]) -> str:
        self.number += 1
        return event({**data, "sequence_number": self.number}, data["type"])

    def _told(self, kind: str) -> str:
        return self._event({"type": kind, "response": self.response().model_dump()})

    def _keep(self, response: BaseModel | bytes) -> None:
        if self.stored:
            kept = self.to_store()
            kept.content = response if isinstance(response, bytes) else response.model_dump_json().encode()
            self.service.responses.add(kept)

    def to_store(self) -> Stored:
        given = listed_input(self.body.input)
        ids = tuple(item["id"] for item in (*given, *self.items.items))
        return Stored(self.id, self.body._owner, self.body.previous_response_id, json.dumps(given).encode(), ids)

    @property
    def status(self) -> str:
        if self.ended is not None:
            return self.ended
        match self.choice.finish_reason:
            case None:
                return "queued" if self.queued else "in_progress"
            case "length":
                return "incomplete"
        return "completed"

    def response(self) -> ResponsesResponse:
        body, status = self.body, self.status
        over = status not in ("queued", "in_progress")
        chosen, text_format = body.tool_choice, body.text.format if body.text else None
        form = text_format.model_dump(by_alias=True, exclude_none=True) if text_format else {"type": "text"}
        verbosity = {"verbosity": body.text.verbosity} if body.text and body.text.verbosity else {}
        return ResponsesResponse(
            id=self.id,
            created_at=self.created,
            completed_at=self.completed if status == "completed" else None,
            status=status,
            background=bool(body.background),
            model=self.model,
            output=self.items.items if over else [],
            usage=self.response_usage() if over else None,
            instructions=body.instructions,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            error=self.error,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=chosen if isinstance(chosen, str) else chosen.model_dump() if chosen else "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            temperature=body.temperature,
            top_p=body.top_p,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            previous_response_id=body.previous_response_id,
            top_logprobs=body.top_logprobs,
            reasoning=body.reasoning.model_dump() if body.reasoning else None,
            text={"format": form, **verbosity},
            user=body.user,
            prompt_cache_key=body.prompt_cache_key,
            safety_identifier=body.safety_identifier,
            truncation=body.truncation or "disabled",
            store=self.stored,
        )

    def response_usage(self) -> ResponseUsage:
        usage = self.chat.usage()
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=cached, cache_write_tokens=usage.prompt_tokens - cached),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self.choice.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )


def check_input(body: PromptFields) -> None:
    if body.input is None and body.previous_response_id is None:
        raise UserError("input", "missing", "Give input, or a previous_response_id.")


def earlier_items(body: PromptFields) -> list[InputItem]:
    """What was said in the responses that this one continues; their instructions are not part of it."""
    found: list[InputItem] = []
    for stored in body._before:
        found += ITEMS.validate_python(json.loads(stored.input))
        found += ITEMS.validate_python(stored.response()["output"])
    return found


def count_tokens(service: Service, body: PromptFields) -> InputTokens:
    """Of the very prompt that the model would be given."""
    check_input(body)
    service.adapter(body.model)
    prompt = conversation(as_chat(body, earlier_items(body)), service.tokenizer, service.parser).text
    return InputTokens(input_tokens=len(service.tokenize(prompt, special=False)))


def _shortened(service: Service, body: ResponsesRequest, before: Sequence[InputItem], salt: str) -> Chat:
    """The chat with as few of its first items left out as make it fit into the model's context."""
    given = [] if body.input is None or isinstance(body.input, str) else body.input
    items = [*before, *given]
    places = [place for place in range(len(items) + 1) if _may_begin(items[place:])]
    if given:
        places = [place for place in places if place < len(items)]

    def attempt(place: int) -> Chat | None:
        text = body.input if isinstance(body.input, str) else None
        shorter = body.model_copy(update={"input": text})
        try:
            return Chat.prepare(service, as_chat(shorter, items[place:]), salt)
        except TooLong:
            return None

    low, high = 0, len(places) - 1
    best = attempt(places[low]) if places else None
    if best is not None or not places:
        return best or Chat.prepare(service, as_chat(body, before), salt)
    while low < high:
        middle = (low + high) // 2
        found = attempt(places[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best or attempt(places[low]) or Chat.prepare(service, as_chat(body, before), salt)


def _may_begin(items: Sequence[InputItem]) -> bool:
    """No conversation begins with the result of a call that was left out, or in the middle of the model's turn."""
    return not items or (items[0].type == "message" and items[0].role != "assistant")
