"""Several models in one server: a request goes to the one whose name its body gives.

Every model has its own engine, `Service` and application. What they share stands before this: keys, limits, the body.
A request that names no model, or one that nobody knows, goes to the first, which answers or says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from moesaic.serve.api.fields import RECEIVED
from moesaic.serve.api.service import Service

MODELS_PATH = "/v1/models/"


class ModelRouter:
    def __init__(self, apps: Sequence[tuple[Service, ASGIApp]]) -> None:
        self.apps = apps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._choose(scope) if scope["type"] == "http" else self.apps[0][1]
        await app(scope, receive, send)

    def _choose(self, scope: Scope) -> ASGIApp:
        name = wanted_model(scope)
        for service, app in self.apps:
            # Ollama's clients add a tag to every name.
            if name is not None and (service.knows(name) or service.knows(name.removesuffix(":latest"))):
                return app
        return self.apps[0][1]


def wanted_model(scope: Scope) -> str | None:
    """By the body, by the path of a model, or by `?model=` where there is neither."""
    received = RECEIVED.get()
    if received is not None and isinstance(received.content, dict):
        ollama = scope["path"].startswith("/api/")
        name = received.content.get("model") or (received.content.get("name") if ollama else None)
        if isinstance(name, str):
            return name.removesuffix(":latest") if ollama else name
    if scope["path"].startswith(MODELS_PATH):
        return str(scope["path"]).removeprefix(MODELS_PATH)
    found = parse_qs(scope["query_string"].decode("latin-1")).get("model")
    return found[0] if found else None
