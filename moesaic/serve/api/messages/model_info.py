"""GET /v1/models in the form of Anthropic's API, for clients that send its `anthropic-version` header."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel
from starlette.requests import Request

HEADER = "anthropic-version"


class ModelInfo(BaseModel):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(BaseModel):
    """All of them are one page."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str | None
    last_id: str | None


def wanted(http: Request) -> bool:
    return HEADER in http.headers


def info(name: str, created: int, context: int) -> ModelInfo:
    date = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(id=name, display_name=name, created_at=date, max_input_tokens=context, max_tokens=context)


def page(models: Sequence[ModelInfo]) -> ModelPage:
    ids = [model.id for model in models]
    return ModelPage(data=list(models), first_id=ids[0] if ids else None, last_id=ids[-1] if ids else None)
