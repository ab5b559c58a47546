"""A chat whose one choice is sent as a message of Anthropic's API, whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from moesaic.serve.api.chat import Chat, ChoiceBuilder
from moesaic.serve.api.errors import ApiError, anthropic_form
from moesaic.serve.api.know.sources import Sources, result_location, search_blocks
from moesaic.serve.api.messages.blocks import BlockBuilder
from moesaic.serve.api.messages.threads import keep
from moesaic.serve.api.messages.translate import as_chat, marks_cache, messages_field
from moesaic.serve.api.schema.messages import MessageResponse, MessagesRequest, MessageUsage, ThinkingTokens
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import Generation, Outputs, event
from moesaic.serve.core.request import Output

PING_SECONDS = 10.0  # of silence; proxies close a connection on which nothing comes for a minute


class Messages(Generation):
    id_prefix = "msg_"
    ending = ""  # the last event is message_stop

    def __init__(self, service: Service, body: MessagesRequest, chat: Chat) -> None:
        super().__init__(service, body, chat.requests)
        self.chat = chat
        self.choice: ChoiceBuilder = next(iter(chat.choices.values()))
        self.blocks = BlockBuilder(body.thinking is None or body.thinking.display != "omitted")
        self.marked = marks_cache(body)
        self.sources: Sources | None = chat.sources
        if self.sources is not None:
            self.blocks.begin(search_blocks(self.sources))

    @classmethod
    def prepare(cls, service: Service, body: MessagesRequest, salt: str) -> Messages:
        return cls(service, body, Chat.prepare(service, as_chat(body), salt))

    @staticmethod
    def field_name(place: str) -> str:
        return messages_field(Chat.field_name(place))

    def failed(self, error: ApiError) -> str:
        return event(anthropic_form(error.status, error.body.error), "error")

    def heavy(self, output: Output) -> bool:
        return self.chat.heavy(output)

    def push(self, output: Output) -> list[dict[str, Any]]:
        """The events to stream."""
        events, _ = self.choice.push(output)
        streamed = self.blocks.push(events)
        if output.finish_reason is not None and self.sources is not None:
            passages = self.sources.passages
            self.blocks.cite([result_location(one, passages[one.number - 1]) for one in self.choice.citations])
        return streamed + self.blocks.finish() if output.finish_reason is not None else streamed

    async def collect(self, outputs: Outputs) -> MessageResponse:
        await super().collect(outputs)
        return self._kept()

    async def events(self, outputs: Outputs) -> AsyncIterator[str]:
        """`message_start` says how much of the prompt was cached, which is known with the first token."""
        started = False
        async for batch in with_pauses(outputs.batches(), PING_SECONDS):
            if batch is None:
                yield event({"type": "ping"}, "ping")
                continue
            streamed = [] if started else [self._start(), {"type": "ping"}]
            started = True
            for output in batch:
                streamed += await self.beside(self.take, output)
            if streamed:
                yield "".join(event(data, data["type"]) for data in streamed)
        end = self._kept()
        delta = {"stop_reason": end.stop_reason, "stop_sequence": end.stop_sequence}
        yield event({"type": "message_delta", "delta": delta, "usage": end.usage.model_dump()}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def _start(self) -> dict[str, Any]:
        message = self.response().model_dump() | {"content": [], "stop_reason": None, "stop_sequence": None}
        message["usage"] |= {"output_tokens": 0, "output_tokens_details": {"thinking_tokens": 0}}
        return {"type": "message_start", "message": message}

    def response(self) -> MessageResponse:
        reason, sequence = self._stop()
        return MessageResponse(
            id=self.id,
            model=self.model,
            content=self.blocks.blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=self.message_usage(),
        )

    def _kept(self) -> MessageResponse:
        response = self.response()
        keep(self.service.responses, self.body, response)
        return response

    def _stop(self) -> tuple[str, str | None]:
        request = self.requests[0]
        match self.choice.finish_reason:
            case "tool_calls":
                return "tool_use", None
            case "length" if request.written < self.body.max_tokens:
                return "model_context_window_exceeded", None
            case "length":
                return "max_tokens", None
        if isinstance(request.stop_reason, str):
            return "stop_sequence", request.stop_reason
        return "end_turn", None

    def message_usage(self) -> MessageUsage:
        """What is computed of a prompt is cached for later ones; it counts as such where the request asked for it."""
        usage = self.chat.usage()
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        computed = usage.prompt_tokens - cached
        return MessageUsage(
            input_tokens=0 if self.marked else computed,
            cache_creation_input_tokens=computed if self.marked else 0,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ThinkingTokens(thinking_tokens=self.choice.reasoning_tokens),
        )


async def with_pauses(batches: AsyncIterator[list[Output]], seconds: float) -> AsyncIterator[list[Output] | None]:
    """The same batches, and None wherever none came for so many seconds. Only the first may be long in coming: a timer
    for each of the others would cost as much as sending it."""
    first = asyncio.ensure_future(anext(batches, None))
    try:
        while not (await asyncio.wait((first,), timeout=seconds))[0]:
            yield None
        batch = first.result()
    finally:
        first.cancel()
    while batch is not None:
        yield batch
        batch = await anext(batches, None)
