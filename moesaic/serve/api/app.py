"""The application: every route, behind keys and limits. `server.py` runs it."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import moesaic
from moesaic.serve.api import chat, completions, embeddings, errors, models, page, responses, status, tokens
from moesaic.serve.api.head import HeadAsGet
from moesaic.serve.api.keys import OPEN, KeyGuard
from moesaic.serve.api.limits import BodyLimits
from moesaic.serve.api.service import Service


def make_app(service: Service) -> FastAPI:
    settings = service.settings
    app = FastAPI(title="Moesaic", version=moesaic.__version__, docs_url=None, redoc_url=None)
    errors.install(app)
    for part in (chat, completions, responses, embeddings, tokens, models, status):
        app.include_router(part.router(service))
    app.include_router(page.router())
    # The last added is the first to see a request.
    app.add_middleware(HeadAsGet)
    app.add_middleware(BodyLimits, most=settings.max_body, seconds=settings.body_seconds)
    app.add_middleware(KeyGuard, keys=settings.keys, open=OPEN | page.paths())
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app
