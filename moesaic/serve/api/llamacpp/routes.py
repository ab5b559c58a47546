"""The routes of llama.cpp's server that are not OpenAI's. What the API has elsewhere under the same path is there:
/tokenize, /detokenize, /apply-template, /rerank, /health, /metrics, /models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.llamacpp import embeddings, props
from moesaic.serve.api.llamacpp.completion import Infilling, NativeCompletion
from moesaic.serve.api.llamacpp.schema import CompletionRequest, EmbeddingRequest, InfillRequest
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import generate, while_connected


def router(service: Service) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.post("/completion")
    @routes.post("/completions")
    async def completion(body: CompletionRequest, request: HttpRequest) -> Response:
        """Text that continues a prompt."""
        return await generate(NativeCompletion, service, body, request)

    @routes.post("/infill")
    async def infill(body: InfillRequest, request: HttpRequest) -> Response:
        """Text between a prefix and a suffix."""
        return await generate(Infilling, service, body, request)

    @routes.post("/embedding")
    @routes.post("/embeddings")
    async def embedding(body: EmbeddingRequest, request: HttpRequest) -> Response:
        """Texts as vectors."""
        salt = service.cache_salt(request.state, None)
        requests = await service.prepare(lambda: embeddings.prepare(service, body, salt))
        return await while_connected(request, embeddings.embed(service, body, requests))

    @routes.get("/props")
    async def get_props() -> dict[str, Any]:
        return props.props(service)

    @routes.get("/slots")
    async def get_slots(fail_on_no_slot: str | None = None) -> list[dict[str, Any]]:
        found = props.slots(service)
        if fail_on_no_slot and all(slot["is_processing"] for slot in found):
            raise ApiError(503, "all slots are busy", code="no_slot")
        return found

    @routes.get("/lora-adapters")
    async def get_adapters() -> list[dict[str, Any]]:
        return props.lora_adapters(service)

    def refuse(path: str, why: str) -> None:
        @routes.post(path)
        async def refused() -> None:
            raise ApiError(501, why, code="not_supported")

    refuse("/props", "properties of this server are set when it is started")
    refuse("/slots/{slot}", "the KV cache is shared by all requests, and kept by --cache-disk-gb, not slot by slot")
    refuse("/lora-adapters", "an adapter is applied by requests that name it, as their model or as lora")
    return routes
