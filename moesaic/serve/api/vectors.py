"""Texts as vectors: what embeddings, rerank and score of every dialect are made of."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from moesaic.errors import UserError
from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.prompts import tokens_of, tokens_to_keep
from moesaic.serve.api.schema.embeddings import EmbeddingUsage, PoolingRequest, VectorOptions
from moesaic.serve.api.service import Service
from moesaic.serve.core.pooling import Pooling, dense_layers, normalized, pooled
from moesaic.serve.core.request import Request, Sampling

# Of all texts of one request together, as OpenAI has it: a body of short ones would hold an engine for minutes.
MAX_TOKENS = 300_000


Texts = Sequence[tuple[str, str | Sequence[int]]]  # each with its place in the request, which errors name


@contextmanager
def at(place: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        error.place = place if error.place in ("prompt", "text") else error.place
        raise


def tokenized(service: Service, texts: Texts, body: PoolingRequest) -> Iterator[tuple[str, list[int]]]:
    """The tokens of each text, cut off as the request says."""
    total = 0
    special = getattr(body, "add_special_tokens", None) is not False
    for place, text in texts:
        with at(place):
            tokens = _tokens(service, text, body, special)
            service.check_prompt(tokens)
        if not tokens:
            raise UserError(place, "is empty")
        total += len(tokens)
        check_total(total, place)
        yield place, tokens


def check_total(total: int, place: str) -> None:
    if total > MAX_TOKENS:
        message = f"all texts together have more than {MAX_TOKENS} tokens, which is the maximum of one request"
        raise ApiError(413, message, param=place, code="too_many_tokens")


def pooling_requests(
    service: Service, texts: Texts, body: PoolingRequest, salt: str, sampling: Sampling, **options: Any
) -> list[Request]:
    """One for each text."""
    options |= {"adapter": service.adapter(body.model), "salt": salt, "priority": body.priority or 0}
    requests = []
    for place, tokens in tokenized(service, texts, body):
        with at(place):
            requests.append(service.engine.request(tokens, sampling, **options))
    return requests


def _tokens(service: Service, text: str | Sequence[int], body: PoolingRequest, special: bool) -> list[int]:
    keep = tokens_to_keep(body.truncate_prompt_tokens, service.max_prompt)
    return tokens_of(service, text, keep, left=body.truncation_side == "left", special=special)


def embedding_requests(
    service: Service, texts: Texts, body: PoolingRequest, salt: str, pooling: Pooling
) -> list[Request]:
    return pooling_requests(service, texts, body, salt, Sampling(max_tokens=1), embed=True, pooling=pooling)


def check_embeds(service: Service) -> None:
    """Whether pooled hidden states are all there is to this model's embeddings."""
    if more := dense_layers(service.engine.tokenizer):
        problem = f"its embeddings need a layer this server does not have ({', '.join(more)})"
        raise UserError("model", problem, "Ask for hidden states (/pooling) instead.")


async def run(service: Service, requests: Sequence[Request]) -> None:
    """Until all have finished. A long list takes turns with other clients."""
    at_once = service.engine.scheduler.max_requests
    for start in range(0, len(requests), at_once):
        outputs = service.submit(requests[start : start + at_once])
        try:
            async for _ in outputs:
                pass
        finally:
            outputs.close()


def check_vector_options(service: Service, body: VectorOptions) -> None:
    size = service.engine.model.config.hidden
    if body.dimensions is not None and body.dimensions > size:
        raise UserError("dimensions", f"this model's embeddings have {size}", f"Ask for {size} or fewer.")


def vector(request: Request, body: VectorOptions) -> Tensor:
    """The embedding of a finished request, with as many dimensions as wanted; of single tokens, (tokens, D)."""
    assert request.hidden_D is not None
    found = pooled(request.pooling, request.hidden_D, len(request.prompt))[..., : body.dimensions]
    wanted = body.normalize if body.normalize is not None else request.pooling != "none"
    return normalized(found) if wanted else found


def encoded(found: Tensor, encoding: str | None) -> list[float] | str:
    numbers = found.float().cpu().numpy().astype("<f4")
    plain: list[float] = numbers.tolist()
    return base64.b64encode(numbers.tobytes()).decode() if encoding == "base64" else plain


def usage(requests: Sequence[Request]) -> EmbeddingUsage:
    tokens = sum(len(request.prompt) for request in requests)
    return EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
