"""How likely given tokens are after a query and each of some items: SGLang's POST /v1/score with `label_token_ids`, and
vLLM's /generative_scoring."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from moesaic.errors import UserError
from moesaic.serve.api import vectors
from moesaic.serve.api.schema.completions import Tokens
from moesaic.serve.api.schema.embeddings import EmbeddingUsage, PoolingRequest
from moesaic.serve.api.schema.sampling import Token
from moesaic.serve.api.schema.scoring import MAX_PAIRS, Score, ScoreResponse
from moesaic.serve.api.service import Service, new_id
from moesaic.serve.core.request import Request
from moesaic.serve.core.sampling import Sampling


class LabelScoreRequest(PoolingRequest):
    query: str | Tokens
    items: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PAIRS)]
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_PAIRS)]
    )
    label_token_ids: Annotated[list[Token], Field(min_length=1, max_length=1024)]
    apply_softmax: bool | None = Field(default=None, description="Over the given tokens, not the whole vocabulary.")
    item_first: bool = False
    add_special_tokens: bool | None = None


class LabelScores(BaseModel):
    scores: list[list[float]]
    object: Literal["scoring"] = "scoring"
    model: str
    usage: EmbeddingUsage


def prepare(service: Service, body: LabelScoreRequest, salt: str) -> list[Request]:
    items: Sequence[str | list[int]] = [body.items] if isinstance(body.items, str) else body.items
    texts = [(f"items.{number}", joined(service, body, item)) for number, item in enumerate(items)]
    sampling = Sampling(max_tokens=1, temperature=0.0, logprob_tokens=tuple(body.label_token_ids))
    try:
        return vectors.pooling_requests(service, texts, body, salt, sampling)
    except UserError as error:
        error.place = {"logprob_token_ids": "label_token_ids"}.get(error.place, error.place)
        raise


def joined(service: Service, body: LabelScoreRequest, item: str | Sequence[int]) -> str | list[int]:
    parts = (item, body.query) if body.item_first else (body.query, item)
    if isinstance(parts[0], str) and isinstance(parts[1], str):
        return parts[0] + parts[1]
    special = body.add_special_tokens is not False
    first, second = parts
    one = service.tokenize(first, special=special) if isinstance(first, str) else list(first)
    return one + (service.tokenize(second, special=False) if isinstance(second, str) else list(second))


def probabilities(request: Request, labels: Sequence[int], among_labels: bool) -> list[float]:
    """Of each label after one prompt; `among_labels`, as if there were no other tokens."""
    found = dict(request.logprobs[0].top)
    logs = [found[label] for label in labels]
    if not among_labels:
        return [math.exp(log) for log in logs]
    most = max(logs)
    shares = [math.exp(log - most) for log in logs]
    return [share / sum(shares) for share in shares]


async def label_scores(service: Service, body: LabelScoreRequest, requests: Sequence[Request]) -> LabelScores:
    """As SGLang writes them: all labels of every item."""
    await vectors.run(service, requests)
    return LabelScores(
        scores=[probabilities(request, body.label_token_ids, bool(body.apply_softmax)) for request in requests],
        model=body.model or service.settings.name,
        usage=vectors.usage(requests),
    )


async def first_label(service: Service, body: LabelScoreRequest, requests: Sequence[Request]) -> ScoreResponse:
    """As vLLM writes them: the first label of every item, by default among the labels."""
    await vectors.run(service, requests)
    among = body.apply_softmax is not False
    scores = [probabilities(request, body.label_token_ids, among)[0] for request in requests]
    return ScoreResponse(
        id=new_id("score-"),
        created=int(time.time()),
        model=body.model or service.settings.name,
        data=[Score(index=index, score=score) for index, score in enumerate(scores)],
        usage=vectors.usage(requests),
    )
