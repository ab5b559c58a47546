"""POST /v1/responses: a chat in the form of OpenAI's Responses API."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from moesaic.serve.api.chat import Chat, ChoiceBuilder
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.response_items import ItemBuilder
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.responses import (
    ChosenTool,
    InputDetails,
    InputFunctionCall,
    InputFunctionOutput,
    InputMessage,
    ObjectFormat,
    OutputDetails,
    ResponsesRequest,
    ResponsesResponse,
    ResponseUsage,
    SchemaFormat,
)
from moesaic.serve.api.schema.sampling import ExtraSamplingParams
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import STREAMS, Generation, event, generate
from moesaic.serve.core.engine_loop import OutputStream
from moesaic.serve.core.request import Output

SHARED = ("model", "temperature", "top_p", "seed", "parallel_tool_calls", "chat_template_kwargs")  # by both requests
LOGPROBS = "message.output_text.logprobs"


def as_chat(body: ResponsesRequest) -> ChatCompletionRequest:
    """The same request for a chat completion."""
    names = (*SHARED, *ExtraSamplingParams.model_fields)
    fields: dict[str, Any] = {name: value for name in names if (value := getattr(body, name)) is not None}
    fields |= {"messages": chat_messages(body), "max_tokens": body.max_output_tokens}
    if isinstance(body.tool_choice, ChosenTool):
        fields["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    elif body.tool_choice is not None:
        fields["tool_choice"] = body.tool_choice
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    match body.text.format if body.text else None:
        case ObjectFormat():
            fields["response_format"] = {"type": "json_object"}
        case SchemaFormat(name=name, json_schema=schema):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    return ChatCompletionRequest.model_validate(fields)


def responses_field(place: str) -> str:
    """What a field of a chat completion is called here."""
    place = re.sub(r"^(tools\.\d+)\.function", r"\1", place)
    place = re.sub(r"^response_format(\.json_schema)?", "text.format", place)
    return {"messages": "input", "max_tokens": "max_output_tokens"}.get(place, place)


def chat_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        match item:
            case InputMessage():
                messages.append(item.model_dump(exclude={"type"}))
            case InputFunctionCall():
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant"})
                messages[-1].setdefault("tool_calls", []).append(call)  # one turn, as the model wrote it
            case InputFunctionOutput():
                output = item.model_dump()["output"]
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return messages or [{"role": "user", "content": ""}]


class Responses(Generation):
    """A chat whose one choice is sent as items."""

    id_prefix = "resp_"
    ending = ""  # the last event is response.completed or response.incomplete

    def __init__(self, service: Service, body: ResponsesRequest, chat: Chat) -> None:
        super().__init__(service, body, chat.requests)
        self.chat = chat
        self.choice: ChoiceBuilder = next(iter(chat.choices.values()))
        self.items = ItemBuilder()

    @classmethod
    def prepare(cls, service: Service, body: ResponsesRequest, salt: str) -> Responses:
        return cls(service, body, Chat.prepare(service, as_chat(body), salt))

    @staticmethod
    def field_name(place: str) -> str:
        return responses_field(Chat.field_name(place))

    def push(self, output: Output) -> list[dict[str, Any]]:
        """The events to stream."""
        events, logprobs = self.choice.push(output)
        streamed = self.items.push(events, [token.model_dump() for token in logprobs])
        if output.finish_reason is not None:
            streamed += self.items.finish(output.finish_reason != "length")
        return streamed

    async def events(self, outputs: OutputStream) -> AsyncIterator[str]:
        number = -1

        def numbered(data: dict[str, Any]) -> str:
            nonlocal number
            number += 1
            return event({**data, "sequence_number": number}, data["type"])

        yield numbered({"type": "response.created", "response": self.response().model_dump()})
        yield numbered({"type": "response.in_progress", "response": self.response().model_dump()})
        async for batch in outputs.batches():
            if streamed := [numbered(data) for output in batch for data in self.take(output)]:
                yield "".join(streamed)
        response = self.response()
        yield numbered({"type": f"response.{response.status}", "response": response.model_dump()})

    def response(self) -> ResponsesResponse:
        body, reason = self.body, self.choice.finish_reason
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        chat_usage = self.chat.usage()
        assert chat_usage.prompt_tokens_details
        usage = ResponseUsage(
            input_tokens=chat_usage.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=chat_usage.prompt_tokens_details.cached_tokens),
            output_tokens=chat_usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self.choice.reasoning_tokens),
            total_tokens=chat_usage.total_tokens,
        )
        chosen, text_format = body.tool_choice, body.text.format if body.text else None
        return ResponsesResponse(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.model,
            output=self.items.items if reason is not None else [],
            usage=usage if reason is not None else None,
            instructions=body.instructions,
            incomplete_details={"reason": "max_output_tokens"} if reason == "length" else None,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            tool_choice=chosen if isinstance(chosen, str) else chosen.model_dump() if chosen else "auto",
            tools=[tool.model_dump() for tool in body.tools or ()],
            temperature=body.temperature,
            top_p=body.top_p,
            max_output_tokens=body.max_output_tokens,
            top_logprobs=body.top_logprobs,
            reasoning=body.reasoning.model_dump() if body.reasoning else None,
            text={"format": text_format.model_dump(by_alias=True) if text_format else {"type": "text"}},
            user=body.user,
        )


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=ResponsesResponse, responses=ERRORS | STREAMS, tags=["text"])
    async def responses(body: ResponsesRequest, request: HttpRequest) -> Response:
        """A response to a text or a conversation."""
        return await generate(Responses, service, body, request)

    return routes
