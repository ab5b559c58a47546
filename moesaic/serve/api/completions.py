"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from moesaic.errors import UserError
from moesaic.serve.api.continuation import Continuation
from moesaic.serve.api.counting import usage
from moesaic.serve.api.openapi import ERRORS, streams
from moesaic.serve.api.prompts import called_as, texts_of, tokens_of
from moesaic.serve.api.sampling_params import requests, sampling
from moesaic.serve.api.schema.completions import CompletionAnswer, CompletionRequest
from moesaic.serve.api.schema.usage import Usage
from moesaic.serve.api.service import Service, new_id, salt_of
from moesaic.serve.api.stream import DONE, EventStream, event, while_connected
from moesaic.serve.api.structure import check_form, wanted_grammar
from moesaic.serve.core.engine_loop import OutputStream


@dataclass
class Job:
    """`tried` answers to each prompt are written, of which the likeliest `wanted` are given out."""

    service: Service
    form: CompletionRequest
    tried: int
    wanted: int
    answers: list[Continuation]

    @property
    def model(self) -> str:
        return self.form.model or self.service.settings.name

    @property
    def prompts(self) -> int:
        return len(self.answers) // self.tried

    def usage(self) -> Usage:
        requests = [answer.request for answer in self.answers]
        return usage(requests, self.prompts, dropped=int(self.form.max_tokens == 0))

    def best(self) -> list[Continuation]:
        chosen = []
        for start in range(0, len(self.answers), self.tried):
            group = self.answers[start : start + self.tried]
            if self.tried > self.wanted:
                group = sorted(group, key=lambda answer: -answer.likelihood)[: self.wanted]
            chosen += group
        return chosen


def prepare(service: Service, form: CompletionRequest, salt: str) -> Job:
    wanted = form.n or 1
    tried = form.best_of or wanted
    if tried < wanted:
        raise UserError("best_of", f"must be at least n, which is {wanted}")
    if tried > wanted and form.stream:
        raise UserError("best_of", "an answer that is chosen when all are written cannot be streamed")
    if form.max_tokens == 0 and not form.echo:
        raise UserError("max_tokens", "must be at least 1, unless the prompt is to be echoed")
    wishes = sampling(
        form,
        service.engine.tokenizer,
        # Reading a prompt gives its log-probabilities, and a token too many, which is dropped.
        max_tokens=1 if form.max_tokens == 0 else form.max_tokens,
        logprobs=form.logprobs,
        prompt_logprobs=form.logprobs if form.echo and form.prompt_logprobs is None else form.prompt_logprobs,
        grammar=wanted_grammar(form),
    )
    tokens = tokens_of(service, form.prompt)
    service.check_count(len(tokens) * tried)
    texts = texts_of(service, form.prompt, tokens) if form.echo else [""] * len(tokens)
    answers: list[Continuation] = []
    for number, (own, text) in enumerate(zip(tokens, texts, strict=True)):
        with called_as("prompt", form.prompt, number):
            made = requests(service, form, own, wishes, salt=salt, count=tried)
        answers += [Continuation(request, service.texts, text, form) for request in made]
    return Job(service, form, tried, wanted, answers)


async def whole(job: Job, answers: OutputStream) -> CompletionAnswer:
    own = {answer.request.number: answer for answer in job.answers}
    async for output in answers:
        check_form(output)
        own[output.request.number].push(output)
    return CompletionAnswer(
        id=new_id("cmpl-"),
        created=int(time.time()),
        model=job.model,
        choices=[answer.choice(index) for index, answer in enumerate(job.best())],
        usage=job.usage(),
    )


async def events(job: Job, answers: OutputStream) -> AsyncIterator[str]:
    options = job.form.stream_options
    with_usage = options is not None and options.include_usage
    own = {answer.request.number: (index, answer) for index, answer in enumerate(job.answers)}
    frame = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": job.model}
    async for output in answers:
        check_form(output)
        index, answer = own[output.request.number]
        change = answer.push(output)
        if change.text or change.logprobs is not None or change.finish_reason is not None:
            choice = change.model_dump(exclude={"prompt_logprobs"}) | {"index": index}
            spent = job.usage().model_dump() if options is not None and options.continuous_usage_stats else None
            yield event({**frame, "choices": [choice], **({"usage": spent} if with_usage else {})})
    if with_usage:
        yield event({**frame, "choices": [], "usage": job.usage().model_dump()})


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=CompletionAnswer, responses=ERRORS | streams(), tags=["text"])
    async def completions(form: CompletionRequest, request: Request) -> Response:
        """How a text goes on."""
        salt = salt_of(request.state, form.cache_salt)
        job = await service.prepare(lambda: prepare(service, form, salt))
        answers = service.submit([answer.request for answer in job.answers])
        if form.stream:
            return EventStream(events(job, answers), DONE, answers.close)
        try:
            answer = await while_connected(request, whole(job, answers))
        finally:
            answers.close()
        return answer if isinstance(answer, Response) else JSONResponse(answer.model_dump())

    return routes
