"""POST /v1/know/search, GET /v1/know; and OpenAI's names of them: /v1/vector_stores, and search in one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from moesaic.serve.api.errors import ERRORS, ApiError
from moesaic.serve.api.know.sources import bounded
from moesaic.serve.api.knowledge import Bases, Found
from moesaic.serve.api.schema.know import (
    BaseList,
    BaseShown,
    KnowSearchRequest,
    KnowSearchResponse,
    PassageShown,
    StoreResult,
    StoreResults,
    StoreSearchRequest,
    StoreText,
    attributes,
)
from moesaic.serve.api.service import Service


async def search(bases: Bases, body: KnowSearchRequest) -> KnowSearchResponse:
    names = bases.chosen([body.base] if isinstance(body.base, str) else body.base, "base")
    bases.check_method(names, body.method)
    found = await bases.search(names, body.query, body.k, body.method)
    shown = [PassageShown.of(Found(one.base, bounded(one.passage))) for one in found]
    return KnowSearchResponse(query=body.query, data=shown)


async def search_store(bases: Bases, name: str, body: StoreSearchRequest) -> StoreResults:
    if name not in bases.bases:
        raise ApiError(404, f"there is no base {name[:64]!r}", param="vector_store_id", code="not_found")
    queries = [body.query] if isinstance(body.query, str) else body.query
    ranker = body.ranking_options.ranker if body.ranking_options else None
    method = "auto" if ranker is None or ranker.startswith("default") or ranker == "none" else ranker
    bases.check_method([name], method, "ranking_options.ranker")
    best: dict[str, Found] = {}
    for query in queries:
        for one in await bases.search([name], query, body.max_num_results, method):
            best.setdefault(one.passage.id, one)
    return StoreResults(
        search_query=queries, data=[store_result(one) for one in list(best.values())[: body.max_num_results]]
    )


def store_result(found: Found) -> StoreResult:
    passage = bounded(found.passage)
    return StoreResult(
        file_id=passage.id,
        filename=passage.source,
        score=passage.score,
        attributes=attributes(passage),
        content=[StoreText(text=passage.text)],
    )


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["know"])
    bases = service.settings.knowledge

    def shown(name: str) -> BaseShown:
        return BaseShown(id=name, passages=bases.bases[name].rows, methods=list(bases.bases[name].methods))

    @routes.post("/v1/know/search", responses=ERRORS)
    async def know_search(body: KnowSearchRequest) -> KnowSearchResponse:
        """The passages that fit a query best, with where they stand."""
        return await search(bases, body)

    @routes.get("/v1/know")
    async def know() -> BaseList:
        """The knowledge bases of this server."""
        return BaseList(data=[shown(name) for name in bases.bases])

    @routes.get("/v1/vector_stores")
    async def vector_stores() -> dict[str, Any]:
        """The same, as OpenAI lists vector stores."""
        stores = [
            {"id": name, "object": "vector_store", "name": name, "created_at": service.started, "status": "completed"}
            for name in bases.bases
        ]
        return {"object": "list", "data": stores, "has_more": False}

    @routes.post("/v1/vector_stores/{vector_store_id}/search", responses=ERRORS)
    async def vector_store_search(vector_store_id: str, body: StoreSearchRequest) -> StoreResults:
        """A search, as in OpenAI's vector stores."""
        return await search_store(bases, vector_store_id, body)

    return routes
