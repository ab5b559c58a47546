"""The routes that the OpenAPI document does not list, as operations of the same form: other dialects, and probes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from moesaic.serve.api.llamacpp import schema as llamacpp
from moesaic.serve.api.ollama import schema as ollama

BODIES: dict[str, type[BaseModel]] = {
    "/api/chat": ollama.ChatRequest,
    "/api/generate": ollama.GenerateRequest,
    "/api/embed": ollama.EmbedRequest,
    "/api/embeddings": ollama.EmbeddingsRequest,
    "/api/show": ollama.ShowRequest,
    "/completion": llamacpp.CompletionRequest,
    "/infill": llamacpp.InfillRequest,
    "/embedding": llamacpp.EmbeddingRequest,
}
READS = ("/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/lora-adapters", "/models", "/")
REFUSED = ("/api/pull", "/slots/0")


def with_dialects(document: dict[str, Any]) -> dict[str, Any]:
    """The document, with these routes too."""
    schemas = dict(document["components"]["schemas"])
    paths = {path: dict(methods) for path, methods in document["paths"].items()}
    for path, body in BODIES.items():
        schema = body.model_json_schema()
        schemas |= {f"{body.__module__}.{name}": part for name, part in schema.pop("$defs", {}).items()}
        schemas = {name: named(part, body.__module__) for name, part in schemas.items()}
        content = {"application/json": {"schema": named(schema, body.__module__)}}
        paths.setdefault(path, {})["post"] = {"requestBody": {"content": content}}
    for path in READS:
        paths.setdefault(path, {}).setdefault("get", {})
    for path in REFUSED:
        paths.setdefault(path, {}).setdefault("post", {})
    return document | {"paths": paths, "components": {"schemas": schemas}}


def named(schema: Any, module: str) -> Any:
    """A schema whose references are to where its parts are now."""
    if isinstance(schema, dict):
        return {
            key: f"#/components/schemas/{module}.{value.removeprefix('#/$defs/')}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#/$defs/")
            else named(value, module)
            for key, value in schema.items()
        }
    return [named(one, module) for one in schema] if isinstance(schema, list) else schema
