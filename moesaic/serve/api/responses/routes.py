"""POST /v1/responses; GET, DELETE, cancel and input_items of one; POST /v1/responses/input_tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from moesaic.errors import UserError
from moesaic.serve.api.errors import ERRORS, ApiError
from moesaic.serve.api.know.finding import find_sources
from moesaic.serve.api.responses.background import BackgroundRun
from moesaic.serve.api.responses.generation import ITEMS, Responses, check_input, count_tokens, earlier_items
from moesaic.serve.api.responses.listing import page
from moesaic.serve.api.responses.store import Stored
from moesaic.serve.api.responses.translate import as_chat
from moesaic.serve.api.schema.know import FileSearchTool
from moesaic.serve.api.schema.responses import (
    DeletedResponse,
    InputTokens,
    InputTokensRequest,
    ItemList,
    ItemReference,
    PromptFields,
    ResponsesRequest,
    ResponsesResponse,
)
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import STREAMS, EventStream, generate


def owner(http: HttpRequest) -> str:
    return getattr(http.state, "owner", "")


def recall(service: Service, body: PromptFields, http: HttpRequest) -> None:
    """Find what the request continues."""
    body._owner = owner(http)
    names = [item.id for item in body.input if isinstance(item, ItemReference)] if isinstance(body.input, list) else []
    if names:
        found = service.responses.items(body._owner, names)
        whole = {name: ITEMS.validate_python([found[name]])[0] for name in names}
        assert isinstance(body.input, list)
        body.input = [whole[item.id] if isinstance(item, ItemReference) else item for item in body.input]
    if body.previous_response_id is None:
        return
    body._before = service.responses.chain(body._owner, body.previous_response_id)
    status = body._before[-1].response()["status"]
    if status in ("queued", "in_progress"):
        message = f"the previous response is {status.replace('_', ' ')}: wait until it has ended"
        raise ApiError(400, message, param="previous_response_id", code="previous_response_not_ended")


async def begin(service: Service, body: ResponsesRequest, http: HttpRequest) -> Response:
    """Generate a response in the background."""
    store = service.responses
    if body.store is False or not store.enabled:
        raise UserError("background", "background can only be used when `store` is true")
    salt = service.cache_salt(http.state, body.cache_salt)
    generation = await service.prepare(lambda: Responses.prepare(service, body, salt), Responses.field_name)
    outputs = service.submit(generation.requests)
    stored = generation.to_store()
    stored.streamed = bool(body.stream)
    run = BackgroundRun(generation, outputs, store, stored)
    store.add(stored)
    return EventStream(run.follow()) if body.stream else JSONResponse(run.snapshot())


def resumed(stored: Stored, starting_after: int | None) -> AsyncIterator[str]:
    if not stored.streamed:
        message = "only a response created with background and stream can be streamed again"
        raise ApiError(400, message, param="stream", code="invalid_value")
    assert isinstance(stored.run, BackgroundRun)
    return stored.run.follow(0 if starting_after is None else starting_after + 1)


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["text"])
    store = service.responses

    @routes.post("/v1/responses", response_model=ResponsesResponse, responses=ERRORS | STREAMS)
    async def responses(body: ResponsesRequest, request: HttpRequest) -> Response:
        """A response to a text or a conversation."""
        recall(service, body, request)
        if any(isinstance(tool, FileSearchTool) for tool in body.tools or ()):
            salt = service.cache_salt(request.state, body.cache_salt)
            check_input(body)
            body._sources = await find_sources(service, as_chat(body, earlier_items(body)), salt)
        return await (begin(service, body, request) if body.background else generate(Responses, service, body, request))

    @routes.post("/v1/responses/input_tokens", responses=ERRORS)
    async def input_tokens(body: InputTokensRequest, request: HttpRequest) -> InputTokens:
        """How many tokens a request would have."""
        recall(service, body, request)
        return await service.prepare(lambda: count_tokens(service, body), Responses.field_name)

    @routes.get("/v1/responses/{response_id}", response_model=ResponsesResponse, responses=ERRORS | STREAMS)
    async def retrieve(
        response_id: str,
        request: HttpRequest,
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
    ) -> Response:
        """A response that was stored, or is generated in the background; its stream, from any event on."""
        stored = store.get(owner(request), response_id)
        if stream:
            return EventStream(resumed(stored, starting_after))
        return JSONResponse(stored.response())

    @routes.delete("/v1/responses/{response_id}", responses=ERRORS)
    async def delete(response_id: str, request: HttpRequest) -> DeletedResponse:
        """Forget a response; one that is generated is cancelled."""
        stored = store.delete(owner(request), response_id)
        if stored.run is not None and stored.running:
            await stored.run.cancel()
        return DeletedResponse(id=response_id)

    @routes.post("/v1/responses/{response_id}/cancel", response_model=ResponsesResponse, responses=ERRORS)
    async def cancel(response_id: str, request: HttpRequest) -> Response:
        """End a response that is generated in the background."""
        stored = store.get(owner(request), response_id)
        if stored.run is None:
            raise ApiError(400, "Cannot cancel a synchronous response.", param="response_id", code="invalid_value")
        if stored.running:
            await stored.run.cancel()
        return JSONResponse(stored.response())

    @routes.get("/v1/responses/{response_id}/input_items", responses=ERRORS)
    async def input_items(
        response_id: str,
        request: HttpRequest,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> ItemList:
        """The items that a response was asked with."""
        stored = store.get(owner(request), response_id)
        return page(json.loads(stored.input), after, limit, order)

    return routes
