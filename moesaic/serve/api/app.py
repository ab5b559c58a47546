"""The FastAPI application: every route, behind keys and limits. `server.py` runs it."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import moesaic
from moesaic.serve.api import (
    admin,
    chat_routes,
    completions,
    embeddings,
    errors,
    models,
    scoring,
    sglang,
    status,
    tokenization,
    web_page,
)
from moesaic.serve.api.fields import check_fields
from moesaic.serve.api.front import Front
from moesaic.serve.api.keys import OPEN_PATHS, KeyGuard
from moesaic.serve.api.know import mcp
from moesaic.serve.api.know import routes as know
from moesaic.serve.api.llamacpp import routes as llamacpp
from moesaic.serve.api.messages import routes as messages
from moesaic.serve.api.middleware import RequestLimits
from moesaic.serve.api.ollama import routes as ollama
from moesaic.serve.api.responses import routes as responses
from moesaic.serve.api.service import Service
from moesaic.serve.api.several import ModelRouter


def make_app(services: Sequence[Service], hosts: frozenset[str] | None = None) -> ASGIApp:
    """All that a request passes, from the outside in: ids and host, CORS, keys, limits, the model it names."""
    settings = services[0].settings
    users = settings.keys.users()
    for service in services:
        service.join(services, users.values())
    app: ASGIApp = ModelRouter([(service, routes_of(service)) for service in services])
    app = RequestLimits(app, max_body=settings.max_body, body_seconds=settings.body_seconds)
    if settings.keys.hashes or settings.admin_keys.hashes:
        app = KeyGuard(
            app,
            keys=settings.keys,
            users=users,
            open_paths=OPEN_PATHS | web_page.paths(),
            admin_keys=settings.admin_keys,
            admin_prefix=admin.PREFIX,
            admin_paths=admin.PATHS if settings.allow_adapters else admin.PATHS | models.ADAPTER_PATHS,
        )
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-moesaic-ignored", "retry-after"],
        )
    return Front(app, hosts, settings.log_requests)


def routes_of(service: Service) -> FastAPI:
    """The routes of one model."""
    app = FastAPI(title="Moesaic", version=moesaic.__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    for part in (
        *(chat_routes, completions, responses, messages, sglang),
        *(embeddings, scoring),
        *(tokenization, models, status, llamacpp, ollama),
    ):
        app.include_router(check_fields(part.router(service)))
    app.router.routes.append(ollama.probe())
    if service.settings.knowledge:
        app.include_router(check_fields(know.router(service)))
        app.include_router(check_fields(mcp.router(service)))
    app.include_router(web_page.router(service.settings.mcp_origins, service.settings.knowledge.bases))
    if service.settings.admin_keys.hashes:
        app.include_router(check_fields(admin.router(service)))
    return app
