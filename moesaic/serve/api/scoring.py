"""POST /v1/rerank (as Jina, Cohere, llama.cpp, TEI and vLLM have it) and /v1/score (vLLM's)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, Discriminator, RootModel, Tag

from moesaic.errors import UserError
from moesaic.serve.api import label_scores, vectors
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.label_scores import LabelScoreRequest, LabelScores
from moesaic.serve.api.relevance import Pair, Scorer, Text, scorer
from moesaic.serve.api.schema.scoring import (
    MAX_PAIRS,
    Document,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
    TeiResult,
    TextDocument,
)
from moesaic.serve.api.service import Service, new_id
from moesaic.serve.api.stream import while_connected


def _kind(given: Any) -> str:
    return "labels" if isinstance(given, dict) and "label_token_ids" in given else "pairs"


AnyScoreRequest = Annotated[
    Annotated[ScoreRequest, Tag("pairs")] | Annotated[LabelScoreRequest, Tag("labels")], Discriminator(_kind)
]
RERANK_PATHS = ("/rerank", "/v2/rerank", "/reranking", "/v1/reranking")  # beside /v1/rerank


def content(document: Document) -> str:
    return document if isinstance(document, str) else document.text


def rerank_pairs(body: RerankRequest) -> list[Pair]:
    """The query with each document."""
    name = "documents" if body.documents is not None else "texts"
    if (body.documents is None) == (body.texts is None):
        raise UserError("documents", "missing" if body.documents is None else "give either documents or texts")
    query = Text("query", content(body.query))
    documents = body.documents or body.texts or ()
    return [(query, Text(f"{name}.{number}", content(each))) for number, each in enumerate(documents)]


def score_pairs(body: ScoreRequest) -> list[Pair]:
    """One with one, one with each of many, or first with first, second with second."""
    first, second = (_texts(name, getattr(body, name)) for name in ("text_1", "text_2"))
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        problem = f"has {len(first)} texts, and text_2 has {len(second)}"
        raise UserError("text_1", problem, "Give one text, or as many as there are in text_2.")
    return list(zip(first, second, strict=True))


def _texts(name: str, given: Document | Sequence[Document]) -> list[Text]:
    if isinstance(given, str | TextDocument):
        return [Text(name, content(given))]
    return [Text(f"{name}.{number}", content(each)) for number, each in enumerate(given)]


async def rerank(service: Service, body: RerankRequest, pairs: Sequence[Pair], prepared: Scorer) -> BaseModel:
    await vectors.run(service, prepared.requests)
    scores = prepared.scores()
    order = sorted(range(len(pairs)), key=lambda number: (-scores[number], number))[: body.top_n or MAX_PAIRS]
    texts = {number: pairs[number][1].text for number in order}
    if body.texts is not None:
        shown = bool(body.return_text)
        found = [TeiResult(index=n, score=scores[n], text=texts[n] if shown else None) for n in order]
        return RootModel[list[TeiResult]](found)
    shown = body.return_documents is not False
    return RerankResponse(
        id=new_id("rerank-"),
        model=body.model or service.settings.name,
        results=[
            RerankResult(index=n, relevance_score=scores[n], document=TextDocument(text=texts[n]) if shown else None)
            for n in order
        ],
        usage=prepared.usage(),
    )


async def score(service: Service, body: ScoreRequest, prepared: Scorer) -> ScoreResponse:
    await vectors.run(service, prepared.requests)
    return ScoreResponse(
        id=new_id("score-"),
        created=int(time.time()),
        model=body.model or service.settings.name,
        data=[Score(index=index, score=value) for index, value in enumerate(prepared.scores())],
        usage=prepared.usage(),
    )


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["text"])

    async def rerank_route(body: RerankRequest, request: HttpRequest) -> Response:
        """Documents in the order in which they fit a query."""
        salt = service.cache_salt(request.state, body.cache_salt)

        def prepare() -> tuple[list[Pair], Scorer]:
            pairs = rerank_pairs(body)
            return pairs, scorer(service, pairs, body, salt)

        return await while_connected(request, rerank(service, body, *await service.prepare(prepare)))

    async def score_route(body: AnyScoreRequest, request: HttpRequest) -> Response:
        """How well pairs of texts fit; or how likely given tokens are after a query and each of some items."""
        salt = service.cache_salt(request.state, body.cache_salt)
        if isinstance(body, LabelScoreRequest):
            labelled = body
            requests = await service.prepare(lambda: label_scores.prepare(service, labelled, salt))
            return await while_connected(request, label_scores.label_scores(service, body, requests))
        prepared = await service.prepare(lambda: scorer(service, score_pairs(body), body, salt))
        return await while_connected(request, score(service, body, prepared))

    async def generative_route(body: LabelScoreRequest, request: HttpRequest) -> Response:
        """How likely the first of some tokens is after a query and each of some items."""
        salt = service.cache_salt(request.state, body.cache_salt)
        requests = await service.prepare(lambda: label_scores.prepare(service, body, salt))
        return await while_connected(request, label_scores.first_label(service, body, requests))

    form: dict[str, Any] = {"responses": ERRORS, "methods": ["POST"]}
    form["response_model"] = RerankResponse | list[TeiResult]
    routes.add_api_route("/v1/rerank", rerank_route, name="rerank", **form)
    for path in RERANK_PATHS:
        routes.add_api_route(path, rerank_route, include_in_schema=False, **form)
    form["response_model"] = ScoreResponse
    routes.add_api_route("/generative_scoring", generative_route, include_in_schema=False, **form)
    form["response_model"] = ScoreResponse | LabelScores
    routes.add_api_route("/v1/score", score_route, name="score", **form)
    routes.add_api_route("/score", score_route, include_in_schema=False, **form)
    return routes
