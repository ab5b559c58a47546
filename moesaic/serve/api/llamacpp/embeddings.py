"""POST /embedding and /embeddings: vectors in llama.cpp's own form, normalized as asked, or one for every token."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel, RootModel
from torch import Tensor

from moesaic.serve.api import vectors
from moesaic.serve.api.llamacpp.prompts import prompts_of, tokens_of
from moesaic.serve.api.llamacpp.schema import EmbeddingRequest
from moesaic.serve.api.schema.embeddings import VectorOptions
from moesaic.serve.api.service import Service
from moesaic.serve.core.request import Request

NONE, MAXIMUM, EUCLIDEAN = -1, 0, 2  # of `embd_normalize`; others are the p of a p-norm
INT16 = 32760.0  # what the largest number becomes with MAXIMUM


def prepare(service: Service, body: EmbeddingRequest, salt: str) -> list[Request]:
    vectors.check_vector_options(service, options(body))
    vectors.check_embeds(service)
    given = prompts_of(body.content)
    names = ["content"] if len(given) == 1 else [f"content.{number}" for number in range(len(given))]
    texts = [(name, tokens_of(service, one, name)) for one, name in zip(given, names, strict=True)]
    return vectors.embedding_requests(service, texts, options(body), salt, body.pooling or service.pooling)


def options(body: EmbeddingRequest) -> VectorOptions:
    return VectorOptions(model=body.model, dimensions=body.dimensions, normalize=False)


async def embed(service: Service, body: EmbeddingRequest, requests: list[Request]) -> BaseModel:
    await vectors.run(service, requests)
    found: list[dict[str, Any]] = []
    for index, request in enumerate(requests):
        found_D = vectors.vector(request, options(body))
        rows_TD = found_D.reshape(-1, found_D.shape[-1])
        if request.pooling != "none":
            rows_TD = normalized(rows_TD, EUCLIDEAN if body.embd_normalize is None else body.embd_normalize)
        if body.encoding_format == "base64":
            found.append({"index": index, "embedding": vectors.encoded(rows_TD, "base64"), "encoding_format": "base64"})
        else:
            found.append({"index": index, "embedding": rows_TD.tolist()})
    return RootModel[Any](found)


def normalized(rows_TD: Tensor, kind: int) -> Tensor:
    if kind == NONE:
        return rows_TD
    lengths_T1 = (
        rows_TD.abs().amax(-1, keepdim=True) / INT16
        if kind == MAXIMUM
        else torch.linalg.vector_norm(rows_TD, ord=kind, dim=-1, keepdim=True)
    )
    return rows_TD / lengths_T1.clamp_min(torch.finfo(rows_TD.dtype).tiny)
