"""POST /v1/embeddings: the mean hidden state of a text, of length one."""

from __future__ import annotations

import base64
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.serve.api.openapi import ERRORS
from moesaic.serve.api.prompts import called_as, tokens_of
from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.schema.sampling import Form
from moesaic.serve.api.service import Service, salt_of
from moesaic.serve.api.stream import while_connected
from moesaic.serve.core.request import Request as EngineRequest
from moesaic.serve.core.request import Sampling, completion


class EmbeddingRequest(Form):
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: int | None = Field(default=None, ge=1, lt=2**31)
    priority: int | None = Field(default=None, ge=-(2**31), lt=2**31)
    user: str | None = None


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def prepare(service: Service, form: EmbeddingRequest, salt: str) -> list[EngineRequest]:
    adapter = service.adapter(form.model)
    size = service.engine.model.config.hidden
    if form.dimensions not in (None, size):
        raise UserError("dimensions", f"this model's embeddings have {size}", "Leave it out.")
    made = []
    wishes, urgency = Sampling(max_tokens=1), form.priority or 0
    for number, tokens in enumerate(tokens_of(service, form.input, "input")):
        with called_as("input", form.input, number):
            service.check_prompt(tokens)
            made.append(
                service.engine.request(tokens, wishes, embed=True, salt=salt, adapter=adapter, priority=urgency)
            )
    return made


async def whole(service: Service, form: EmbeddingRequest, requests: list[EngineRequest]) -> EmbeddingAnswer:
    most = service.engine.scheduler.most
    for start in range(0, len(requests), most):  # a long list takes turns with other clients
        answers = service.submit(requests[start : start + most])
        try:
            async for _ in answers:
                pass
        finally:
            answers.close()
    name = form.model or service.settings.name
    data = []
    for index, request in enumerate(requests):
        vector_D = completion(request, "").embedding
        assert vector_D is not None
        numbers = vector_D.float().cpu().numpy().astype("<f4")
        as_text = form.encoding_format == "base64"
        value = base64.b64encode(numbers.tobytes()).decode() if as_text else numbers.tolist()
        data.append(Embedding(index=index, embedding=value))
    read = sum(len(request.prompt) for request in requests)
    return EmbeddingAnswer(data=data, model=name, usage=EmbeddingUsage(prompt_tokens=read, total_tokens=read))


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=EmbeddingAnswer, responses=ERRORS, tags=["text"])
    async def embeddings(form: EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors."""
        salt = salt_of(request.state, None)
        requests = await service.prepare(lambda: prepare(service, form, salt))
        answer = await while_connected(request, whole(service, form, requests))
        return answer if isinstance(answer, Response) else JSONResponse(answer.model_dump())

    return routes
