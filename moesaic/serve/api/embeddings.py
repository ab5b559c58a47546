"""POST /v1/embeddings: the mean hidden state of a text, normalized."""

from __future__ import annotations

import base64
from typing import Literal

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.prompts import prompt_place, prompt_tokens
from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.schema.sampling import RequestModel
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import while_connected
from moesaic.serve.core.request import Request, Sampling, completion


class EmbeddingRequest(RequestModel):
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


class EmbeddingResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


def prepare(service: Service, body: EmbeddingRequest, salt: str) -> list[Request]:
    adapter = service.adapter(body.model)
    size = service.engine.model.config.hidden
    if body.dimensions not in (None, size):
        raise UserError("dimensions", f"this model's embeddings have {size}", "Leave it out.")
    requests = []
    sampling, priority = Sampling(max_tokens=1), body.priority or 0
    for number, tokens in enumerate(prompt_tokens(service, body.input, "input")):
        with prompt_place("input", body.input, number):
            service.check_prompt(tokens)
            requests.append(
                service.engine.request(tokens, sampling, embed=True, salt=salt, adapter=adapter, priority=priority)
            )
    return requests


async def embed(service: Service, body: EmbeddingRequest, requests: list[Request]) -> EmbeddingResponse:
    at_once = service.engine.scheduler.max_requests
    for start in range(0, len(requests), at_once):  # a long list takes turns with other clients
        outputs = service.submit(requests[start : start + at_once])
        try:
            async for _ in outputs:
                pass
        finally:
            outputs.close()
    name = body.model or service.settings.name
    data = []
    for index, request in enumerate(requests):
        vector_D = completion(request, "").embedding
        assert vector_D is not None
        numbers = vector_D.float().cpu().numpy().astype("<f4")
        as_text = body.encoding_format == "base64"
        value = base64.b64encode(numbers.tobytes()).decode() if as_text else numbers.tolist()
        data.append(Embedding(index=index, embedding=value))
    tokens = sum(len(request.prompt) for request in requests)
    return EmbeddingResponse(data=data, model=name, usage=EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens))


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse, responses=ERRORS, tags=["text"])
    async def embeddings(body: EmbeddingRequest, request: HttpRequest) -> Response:
        """Texts as vectors."""
        salt = service.cache_salt(request.state, None)
        requests = await service.prepare(lambda: prepare(service, body, salt))
        return await while_connected(request, embed(service, body, requests))

    return routes
