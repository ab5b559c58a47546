"""The FastAPI application: every route, behind keys and limits. `server.py` runs it."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import moesaic
from moesaic.serve.api import (
    admin,
    chat,
    completions,
    embeddings,
    errors,
    models,
    responses,
    scoring,
    status,
    tokenization,
    web_page,
)
from moesaic.serve.api.fields import check_fields
from moesaic.serve.api.keys import OPEN_PATHS, KeyGuard
from moesaic.serve.api.messages import routes as messages
from moesaic.serve.api.middleware import RequestLimits
from moesaic.serve.api.service import Service


def make_app(service: Service) -> FastAPI:
    settings = service.settings
    app = FastAPI(title="Moesaic", version=moesaic.__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    for part in (
        *(chat, completions, responses, messages),
        *(embeddings, scoring),
        *(tokenization, models, status),
    ):
        app.include_router(check_fields(part.router(service)))
    app.include_router(web_page.router())
    if settings.admin_keys.hashes:
        app.include_router(check_fields(admin.router(service)))
    # The last added is the first to see a request.
    app.add_middleware(RequestLimits, max_body=settings.max_body, body_seconds=settings.body_seconds)
    if settings.keys.hashes or settings.admin_keys.hashes:
        app.add_middleware(
            KeyGuard,
            keys=settings.keys,
            open_paths=OPEN_PATHS | web_page.paths(),
            admin_keys=settings.admin_keys,
            admin_prefix=admin.PREFIX,
        )
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app
