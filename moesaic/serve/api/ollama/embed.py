"""POST /api/embed, and the older /api/embeddings."""

from __future__ import annotations

import time
from typing import Any

from pydantic import RootModel

from moesaic.serve.api import vectors
from moesaic.serve.api.ollama.names import known
from moesaic.serve.api.ollama.schema import EmbeddingsRequest, EmbedRequest
from moesaic.serve.api.schema.embeddings import VectorOptions
from moesaic.serve.api.service import Service
from moesaic.serve.core.request import Request

ALL_THAT_FIT = -1


def options(service: Service, model: str, dimensions: int | None = None, *, truncate: bool = True) -> VectorOptions:
    fields: dict[str, Any] = {"model": known(service, model), "dimensions": dimensions or None}
    return VectorOptions(**fields, truncate_prompt_tokens=ALL_THAT_FIT if truncate else None)


def prepare(service: Service, body: EmbedRequest | EmbeddingsRequest, salt: str) -> tuple[VectorOptions, list[Request]]:
    """No text is no vector: clients of an empty prompt want the model loaded."""
    if isinstance(body, EmbeddingsRequest):
        wanted = options(service, body.model)
        texts = [("prompt", body.prompt)] if body.prompt else []
    else:
        wanted = options(service, body.model, body.dimensions, truncate=body.truncate is not False)
        given = [body.input] if isinstance(body.input, str) else body.input
        places = ["input"] if isinstance(body.input, str) else [f"input.{number}" for number in range(len(given))]
        texts = [] if given == [""] else list(zip(places, given, strict=True))
    vectors.check_vector_options(service, wanted)
    vectors.check_embeds(service)
    return wanted, vectors.embedding_requests(service, texts, wanted, salt, pooling(service))


def pooling(service: Service) -> Any:
    return "mean" if service.pooling == "none" else service.pooling


async def embed(
    service: Service, body: EmbedRequest, wanted: VectorOptions, requests: list[Request]
) -> RootModel[dict[str, Any]]:
    begun = time.perf_counter_ns()
    await vectors.run(service, requests)
    return RootModel(
        {
            "model": body.model,
            "embeddings": [vectors.vector(request, wanted).tolist() for request in requests],
            "total_duration": time.perf_counter_ns() - begun,
            "load_duration": 0,
            "prompt_eval_count": vectors.usage(requests).prompt_tokens,
        }
    )


async def embed_one(service: Service, wanted: VectorOptions, requests: list[Request]) -> RootModel[dict[str, Any]]:
    """As the older route has it, which does not normalize."""
    await vectors.run(service, requests)
    plain = wanted.model_copy(update={"normalize": False})
    return RootModel({"embedding": vectors.vector(requests[0], plain).tolist() if requests else []})
