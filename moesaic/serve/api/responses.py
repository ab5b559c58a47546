"""POST /v1/responses: a chat in OpenAI's newer form."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from moesaic.serve.api import chat
from moesaic.serve.api.errors import called
from moesaic.serve.api.openapi import ERRORS, streams
from moesaic.serve.api.response_items import Items
from moesaic.serve.api.schema.chat import ChatRequest
from moesaic.serve.api.schema.responses import (
    InputCall,
    InputDetails,
    InputMessage,
    InputResult,
    ObjectFormat,
    OutputDetails,
    ResponseAnswer,
    ResponseRequest,
    ResponseUsage,
    SchemaFormat,
)
from moesaic.serve.api.schema.sampling import OwnWishes
from moesaic.serve.api.service import Service, new_id, salt_of
from moesaic.serve.api.stream import EventStream, event, while_connected
from moesaic.serve.api.structure import check_form
from moesaic.serve.api.turn import Turn
from moesaic.serve.core.engine_loop import OutputStream
from moesaic.serve.core.request import Output

SAME = ("model", "temperature", "top_p", "seed", "parallel_tool_calls", "chat_template_kwargs")  # in both forms
LOGPROBS = "message.output_text.logprobs"


def as_chat(form: ResponseRequest) -> ChatRequest:
    """The same wishes in the older form."""
    wishes: dict[str, Any] = {
        name: value for name in (*SAME, *OwnWishes.model_fields) if (value := getattr(form, name)) is not None
    }
    named = form.tool_choice if form.tool_choice is None or isinstance(form.tool_choice, str) else None
    if form.tool_choice is not None:
        wishes["tool_choice"] = named or {"type": "function", "function": {"name": form.tool_choice.name}}  # type: ignore[union-attr]
    if form.tools:
        wishes["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in form.tools
        ]
    if form.top_logprobs is not None or LOGPROBS in (form.include or ()):
        wishes |= {"logprobs": True, "top_logprobs": form.top_logprobs or 0}
    if form.reasoning is not None and form.reasoning.effort is not None:
        wishes["reasoning_effort"] = form.reasoning.effort
    match form.text.format if form.text else None:
        case ObjectFormat():
            wishes["response_format"] = {"type": "json_object"}
        case SchemaFormat(name=name, json_schema=schema):
            wishes["response_format"] = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    return ChatRequest.model_validate(wishes | {"messages": messages(form), "max_tokens": form.max_output_tokens})


def as_sent(place: str) -> str:
    """What a field of the older form is called in the newer one."""
    place = re.sub(r"^(tools\.\d+)\.function", r"\1", place)
    place = re.sub(r"^response_format(\.json_schema)?", "text.format", place)
    return {"messages": "input", "max_tokens": "max_output_tokens"}.get(place, place)


def messages(form: ResponseRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if form.instructions is not None:
        found.append({"role": "system", "content": form.instructions})
    if isinstance(form.input, str):
        return [*found, {"role": "user", "content": form.input}]
    for item in form.input:
        match item:
            case InputMessage():
                found.append(item.model_dump(exclude={"type"}))
            case InputCall():
                call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant"})
                found[-1].setdefault("tool_calls", []).append(call)  # one turn, as the model wrote it
            case InputResult():
                output = item.model_dump()["output"]
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    return found or [{"role": "user", "content": ""}]


@dataclass
class Reply:
    """An answer on its way, as items."""

    form: ResponseRequest
    chat: chat.Chat
    items: Items = field(default_factory=Items)
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def turn(self) -> Turn:
        return next(iter(self.chat.turns.values()))

    def push(self, output: Output) -> list[dict[str, Any]]:
        with called(as_sent):
            check_form(output)
        events, infos = self.turn.push(output)
        told = self.items.push(events, [info.model_dump() for info in infos])
        if output.finish_reason is not None:
            told += self.items.finish(output.finish_reason != "length")
        return told

    def answer(self) -> ResponseAnswer:
        form, reason = self.form, self.turn.finish_reason
        status = "in_progress" if reason is None else "incomplete" if reason == "length" else "completed"
        spent = self.chat.usage()
        assert spent.prompt_tokens_details
        usage = ResponseUsage(
            input_tokens=spent.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=spent.prompt_tokens_details.cached_tokens),
            output_tokens=spent.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self.turn.thought),
            total_tokens=spent.total_tokens,
        )
        chosen, wanted = form.tool_choice, form.text.format if form.text else None
        return ResponseAnswer(
            id=self.id,
            created_at=self.created,
            status=status,
            model=self.chat.model,
            output=self.items.items if reason is not None else [],
            usage=usage if reason is not None else None,
            instructions=form.instructions,
            incomplete_details={"reason": "max_output_tokens"} if reason == "length" else None,
            metadata=form.metadata or {},
            parallel_tool_calls=form.parallel_tool_calls is not False,
            tool_choice=chosen if isinstance(chosen, str) else chosen.model_dump() if chosen else "auto",
            tools=[tool.model_dump() for tool in form.tools or ()],
            temperature=form.temperature,
            top_p=form.top_p,
            max_output_tokens=form.max_output_tokens,
            top_logprobs=form.top_logprobs,
            reasoning=form.reasoning.model_dump() if form.reasoning else None,
            text={"format": wanted.model_dump(by_alias=True) if wanted else {"type": "text"}},
            user=form.user,
        )


async def whole(reply: Reply, answers: OutputStream) -> ResponseAnswer:
    async for output in answers:
        reply.push(output)
    return reply.answer()


async def events(reply: Reply, answers: OutputStream) -> AsyncIterator[str]:
    number = -1

    def tell(data: dict[str, Any]) -> str:
        nonlocal number
        number += 1
        return event({**data, "sequence_number": number}, data["type"])

    yield tell({"type": "response.created", "response": reply.answer().model_dump()})
    yield tell({"type": "response.in_progress", "response": reply.answer().model_dump()})
    async for output in answers:
        for told in reply.push(output):
            yield tell(told)
    answer = reply.answer()
    yield tell({"type": f"response.{answer.status}", "response": answer.model_dump()})


def prepare(service: Service, form: ResponseRequest, salt: str) -> Reply:
    with called(as_sent):
        return Reply(form, chat.prepare(service, as_chat(form), salt))


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/responses", response_model=ResponseAnswer, responses=ERRORS | streams(), tags=["text"])
    async def responses(form: ResponseRequest, request: Request) -> Response:
        """An answer to a text or a conversation."""
        salt = salt_of(request.state, form.cache_salt)
        reply = await service.prepare(lambda: prepare(service, form, salt))
        answers = service.submit(reply.chat.requests)
        if form.stream:
            return EventStream(events(reply, answers), close=answers.close)
        try:
            answer = await while_connected(request, whole(reply, answers))
        finally:
            answers.close()
        return answer if isinstance(answer, Response) else JSONResponse(answer.model_dump())

    return routes
