"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from moesaic.errors import UserError
from moesaic.serve.api.conversation import prompt_text
from moesaic.serve.api.counting import prompt_logprobs, usage
from moesaic.serve.api.errors import called
from moesaic.serve.api.openapi import ERRORS, streams
from moesaic.serve.api.sampling_params import requests, sampling
from moesaic.serve.api.schema.chat import ChatAnswer, ChatRequest
from moesaic.serve.api.schema.usage import Usage
from moesaic.serve.api.service import Service, new_id, salt_of
from moesaic.serve.api.stream import DONE, EventStream, event, while_connected
from moesaic.serve.api.structure import check_form, wanted_grammar
from moesaic.serve.api.tools import EventReader, ListReader, NamedReader, call_grammar, forced_tools
from moesaic.serve.api.turn import Turn
from moesaic.serve.core.engine_loop import OutputStream
from moesaic.serve.core.request import Request as EngineRequest


@dataclass
class Chat:
    """A chat the engine has been asked to continue; `turns` are its answers, by the number of their request."""

    service: Service
    form: ChatRequest
    requests: list[EngineRequest]
    turns: dict[int, Turn]

    @property
    def model(self) -> str:
        return self.form.model or self.service.settings.name

    def usage(self) -> Usage:
        return usage(self.requests, thought=sum(turn.thought for turn in self.turns.values()))


def prepare(service: Service, form: ChatRequest, salt: str) -> Chat:
    """Everything that can be wrong with a request shows here."""
    service.adapter(form.model)
    service.check_count(form.n or 1)
    text = prompt_text(form, service.tokenizer)
    forced = forced_tools(form)
    grammar = wanted_grammar(form)
    if forced and grammar is not None:
        raise UserError("tool_choice", "a call that must be made cannot have another form too", "Leave one out.")
    if form.top_logprobs is not None and not form.logprobs:
        raise UserError("top_logprobs", "needs logprobs: true")
    top = (form.top_logprobs or 0) if form.logprobs else None
    wishes = sampling(
        form,
        service.tokenizer,
        max_tokens=form.max_completion_tokens or form.max_tokens,
        logprobs=top,
        prompt_logprobs=form.prompt_logprobs,
        grammar=call_grammar(form, forced) if forced else grammar,
    )
    with called(lambda place: "messages" if place == "prompt" else place):
        tokens = service.read(text, special=False)
        asked = requests(service, form, tokens, wishes, salt=salt, count=form.n or 1)
    offered = [tool.model_dump() for tool in form.tools or ()] if form.tool_choice != "none" else []

    def reader() -> EventReader:
        if forced:
            named = form.tool_choice != "required"
            return NamedReader(forced[0].name) if named else ListReader()
        # A thought that the prompt opened is not gone on with where the form of the answer knows no end of one.
        thinks = grammar is None or "think>" in grammar.text  # in a regular expression the slash is escaped
        return service.parser.reader(offered, text if thinks else "")

    parallel = form.parallel_tool_calls is not False
    turns = {request.number: Turn(i, reader(), service.texts, top, parallel) for i, request in enumerate(asked)}
    return Chat(service, form, asked, turns)


async def whole(chat: Chat, answers: OutputStream) -> ChatAnswer:
    async for output in answers:
        check_form(output)
        chat.turns[output.request.number].push(output)
    return ChatAnswer(
        id=new_id("chatcmpl-"),
        created=int(time.time()),
        model=chat.model,
        choices=[turn.choice() for turn in chat.turns.values()],
        usage=chat.usage(),
        prompt_logprobs=prompt_logprobs(chat.requests[0], chat.service.texts),
    )


async def events(chat: Chat, answers: OutputStream) -> AsyncIterator[str]:
    options = chat.form.stream_options
    with_usage = options is not None and options.include_usage
    frame = {"id": new_id("chatcmpl-"), "object": "chat.completion.chunk", "created": int(time.time())}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | more
        spent = chat.usage().model_dump() if options is not None and options.continuous_usage_stats else None
        extra = {"usage": spent} if with_usage else {}
        return event({**frame, "model": chat.model, "choices": [choice], **extra})

    for turn in chat.turns.values():
        yield chunk(turn.index, {"role": "assistant", "content": ""})
    async for output in answers:
        check_form(output)
        turn = chat.turns[output.request.number]
        changes, infos = turn.push(output)
        delta = turn.delta(changes)
        if delta or infos:
            logprobs = {"content": [info.model_dump() for info in infos], "refusal": None} if infos else None
            yield chunk(turn.index, delta, logprobs=logprobs)
        if turn.finish_reason is not None:
            yield chunk(turn.index, {}, finish_reason=turn.finish_reason)
    if with_usage:
        yield event({**frame, "model": chat.model, "choices": [], "usage": chat.usage().model_dump()})


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatAnswer, responses=ERRORS | streams(), tags=["text"])
    async def chat_completions(form: ChatRequest, request: Request) -> Response:
        """The next message of a conversation."""
        salt = salt_of(request.state, form.cache_salt)
        chat = await service.prepare(lambda: prepare(service, form, salt))
        answers = service.submit(chat.requests)
        if form.stream:
            return EventStream(events(chat, answers), DONE, answers.close)
        try:
            answer = await while_connected(request, whole(chat, answers))
        finally:
            answers.close()
        return answer if isinstance(answer, Response) else JSONResponse(answer.model_dump())

    return routes
