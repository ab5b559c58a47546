"""POST /v1/embeddings: texts as vectors; and /pooling (vLLM's), which also gives the hidden state of every token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from moesaic.errors import UserError
from moesaic.serve.api import vectors
from moesaic.serve.api.chat import prompt_text
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.prompts import single
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.embeddings import (
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    PoolingResponse,
    TokenVectors,
)
from moesaic.serve.api.service import Service, new_id
from moesaic.serve.api.stream import while_connected
from moesaic.serve.core.request import Request


def prepare(service: Service, body: EmbeddingRequest, salt: str) -> list[Request]:
    vectors.check_vector_options(service, body)
    pooling = body.pooling or service.pooling
    texts: list[tuple[str, str | Sequence[int]]]
    if (body.input is None) == (body.messages is None):
        raise UserError("input", "give either input or messages")
    if body.messages is not None:
        fields: dict[str, Any] = {"messages": body.messages, "chat_template_kwargs": body.chat_template_kwargs}
        chat = ChatCompletionRequest(**fields, add_generation_prompt=body.add_generation_prompt)
        special = bool(body.add_special_tokens)  # the template has its own
        tokens = service.tokenize(prompt_text(chat, service.tokenizer), special=special)
        texts = [("messages", tokens)]
    else:
        given = body.input
        assert given is not None
        every: Any = [given] if single(given) else given
        texts = [("input" if single(given) else f"input.{number}", one) for number, one in enumerate(every)]
    return vectors.embedding_requests(service, texts, body, salt, pooling)


async def embed(service: Service, body: EmbeddingRequest, requests: list[Request]) -> EmbeddingResponse:
    await vectors.run(service, requests)
    values = [vectors.encoded(vectors.vector(request, body), body.encoding_format) for request in requests]
    return EmbeddingResponse(
        id=new_id("embd-"),
        created=int(time.time()),
        data=[Embedding(index=index, embedding=value) for index, value in enumerate(values)],
        model=body.model or service.settings.name,
        usage=vectors.usage(requests),
    )


async def pool(service: Service, body: EmbeddingRequest, requests: list[Request]) -> PoolingResponse:
    await vectors.run(service, requests)
    values = [vectors.encoded(vectors.vector(request, body), body.encoding_format) for request in requests]
    return PoolingResponse(
        id=new_id("pool-"),
        created=int(time.time()),
        data=[TokenVectors(index=index, data=value) for index, value in enumerate(values)],
        model=body.model or service.settings.name,
        usage=vectors.usage(requests),
    )


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["text"])

    @routes.post("/v1/embeddings", response_model=EmbeddingResponse, responses=ERRORS)
    async def embeddings(body: EmbeddingRequest, request: HttpRequest) -> Response:
        """Texts as vectors."""
        if (body.pooling or service.pooling) == "none":
            raise UserError(
                "pooling", "none is one vector for each token, which this route has no form for", "Ask /pooling."
            )
        vectors.check_embeds(service)
        salt = service.cache_salt(request.state, body.cache_salt)
        requests = await service.prepare(lambda: prepare(service, body, salt))
        return await while_connected(request, embed(service, body, requests))

    @routes.post("/pooling", response_model=PoolingResponse, responses=ERRORS)
    async def pooling(body: EmbeddingRequest, request: HttpRequest) -> Response:
        """Hidden states of texts: pooled, or with `pooling: none` that of each token."""
        salt = service.cache_salt(request.state, body.cache_salt)
        requests = await service.prepare(lambda: prepare(service, body, salt))
        return await while_connected(request, pool(service, body, requests))

    return routes
