"""GET /v1/models, and LoRA adapters loaded and unloaded while serving."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from moesaic.serve.api.errors import ERRORS, ApiError
from moesaic.serve.api.schema.sampling import RequestModel
from moesaic.serve.api.service import Service


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moesaic"
    root: str
    parent: str | None = None
    max_model_len: int
    sampling: dict[str, float] = Field(description="The model's own defaults, unless a request sets others.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class LoadAdapter(RequestModel):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapter(RequestModel):
    lora_name: str


class AdapterResponse(BaseModel):
    status: str


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["models"])
    name, engine = service.settings.name, service.engine

    def card(model: str) -> ModelCard:
        parent = None if model == name else name
        return ModelCard(
            id=model,
            created=service.started,
            root=name,
            parent=parent,
            max_model_len=service.context,
            sampling=service.sampling_defaults,
        )

    @routes.get("/v1/models", responses=ERRORS)
    async def models() -> ModelList:
        """The model, and the adapters that are loaded."""
        return ModelList(data=[card(model) for model in (name, *list(engine.adapters))])

    @routes.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str) -> ModelCard:
        service.adapter(model)
        return card(model)

    if not service.settings.allow_adapters:
        return routes

    @routes.post("/v1/load_lora_adapter", responses=ERRORS)
    async def load_lora_adapter(body: LoadAdapter) -> AdapterResponse:
        """Load an adapter from a directory the server can read; requests name it as their model."""
        if body.lora_name == name:
            raise ApiError(400, f"{name!r} is the model itself", param="lora_name", code="invalid_value")
        await service.loop.load_adapter(body.lora_name, body.lora_path)
        return AdapterResponse(status=f"{body.lora_name} is loaded")

    @routes.post("/v1/unload_lora_adapter", responses=ERRORS)
    async def unload_lora_adapter(body: UnloadAdapter) -> AdapterResponse:
        if body.lora_name not in engine.adapters:
            raise ApiError(404, f"there is no adapter {body.lora_name!r}", param="lora_name", code="model_not_found")
        await service.loop.unload_adapter(body.lora_name)
        return AdapterResponse(status=f"{body.lora_name} is unloaded")

    return routes
