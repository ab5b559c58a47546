"""The routes of Ollama's API. Those that fetch, make or remove models are refused: a server has the models it was
started with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.requests import Request
from starlette.routing import Match, Route
from starlette.types import Scope

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.ollama import embed, models
from moesaic.serve.api.ollama.names import known
from moesaic.serve.api.ollama.replies import Generated, RawGenerated, Reply, line, now
from moesaic.serve.api.ollama.schema import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import generate, while_connected

NOT_OFFERED = (
    *(("POST", path) for path in ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/{digest}")),
    *(("DELETE", "/api/delete"), ("GET", "/api/blobs/{digest}"), ("POST", "/api/signout"), ("POST", "/api/me")),
)


class Probe(Route):
    """GET /, as Ollama's own clients ask whether a server is there; everybody else gets the page."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        agent = dict(scope.get("headers", ())).get(b"user-agent", b"")
        return super().matches(scope) if agent.lower().startswith(b"ollama") else (Match.NONE, {})


def probe() -> Probe:
    """To stand before the page's own route."""
    return Probe("/", alive, methods=["GET"], include_in_schema=False)


async def alive(request: Request) -> Response:
    return PlainTextResponse("Ollama is running")


def loaded(service: Service, body: ChatRequest | GenerateRequest) -> Response | None:
    """The answer to a request that says nothing: clients send one to have a model loaded, or unloaded."""
    nothing = not body.messages if isinstance(body, ChatRequest) else not (body.prompt or body.suffix or body.context)
    if not nothing:
        return None
    known(service, body.model)
    reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
    said: dict[str, Any] = {"response": ""} if isinstance(body, GenerateRequest) else {"message": EMPTY}
    answer = {"model": body.model, "created_at": now(), **said, "done": True, "done_reason": reason}
    return Response(line(answer), media_type=Reply.media_type) if body.stream else JSONResponse(answer)


EMPTY = {"role": "assistant", "content": ""}


def router(service: Service) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.post("/api/chat")
    async def chat(body: ChatRequest, request: HttpRequest) -> Response:
        """The next message of a conversation."""
        return loaded(service, body) or await generate(Reply, service, body, request)

    @routes.post("/api/generate")
    async def generate_text(body: GenerateRequest, request: HttpRequest) -> Response:
        """An answer to a prompt, or text that continues it."""
        kind = RawGenerated if body.raw or body.suffix else Generated
        return loaded(service, body) or await generate(kind, service, body, request)

    @routes.post("/api/embed")
    async def embed_texts(body: EmbedRequest, request: HttpRequest) -> Response:
        salt = service.cache_salt(request.state, None)
        wanted, requests = await service.prepare(lambda: embed.prepare(service, body, salt))
        return await while_connected(request, embed.embed(service, body, wanted, requests))

    @routes.post("/api/embeddings")
    async def embed_prompt(body: EmbeddingsRequest, request: HttpRequest) -> Response:
        salt = service.cache_salt(request.state, None)
        wanted, requests = await service.prepare(lambda: embed.prepare(service, body, salt))
        return await while_connected(request, embed.embed_one(service, wanted, requests))

    @routes.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return models.tags(service)

    @routes.get("/api/ps")
    async def running() -> dict[str, Any]:
        return models.running(service)

    @routes.post("/api/show")
    async def show(body: ShowRequest) -> dict[str, Any]:
        return models.show(service, body.model)

    @routes.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": models.VERSION}

    async def refused() -> None:
        message = "models are given to this server when it is started; none can be fetched, made or removed here"
        raise ApiError(501, message, code="not_supported")

    for method, path in NOT_OFFERED:
        routes.add_api_route(path, refused, methods=[method])
    return routes
