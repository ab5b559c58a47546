"""Names of models as Ollama's clients say them: with a tag, `latest` unless they say otherwise."""

from __future__ import annotations

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.service import Service

LATEST = ":latest"


def plain(model: str) -> str:
    return model.removesuffix(LATEST)


def known(service: Service, model: str) -> str:
    """The name by which the server knows a model."""
    for name in (model, plain(model)):
        if service.knows(name):
            return name
    raise ApiError(404, f"model '{model}' not found", param="model", code="model_not_found")


def tagged(name: str) -> str:
    return name if ":" in name else name + LATEST
