"""GET /v1/models, and LoRA adapters loaded and unloaded while serving."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.openapi import ERRORS
from moesaic.serve.api.schema.sampling import Form
from moesaic.serve.api.service import Service
from moesaic.serve.core.sampling_defaults import recommended


class ModelFacts(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moesaic"
    root: str
    parent: str | None = None
    max_model_len: int
    sampling: dict[str, float] = Field(description="What its makers recommend; a request may wish otherwise.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelFacts]


class LoadAdapter(Form):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)


class UnloadAdapter(Form):
    lora_name: str


class AdapterAnswer(BaseModel):
    status: str


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["models"])
    name, engine = service.settings.name, service.engine

    def facts(model: str) -> ModelFacts:
        parent = None if model == name else name
        return ModelFacts(
            id=model,
            created=service.began,
            root=name,
            parent=parent,
            max_model_len=service.context,
            sampling=recommended(engine.tokenizer),
        )

    @routes.get("/v1/models", responses=ERRORS)
    async def models() -> ModelList:
        """The model, and the adapters that are loaded."""
        return ModelList(data=[facts(model) for model in (name, *list(engine.adapters))])

    @routes.get("/v1/models/{model:path}", responses=ERRORS)
    async def model(model: str) -> ModelFacts:
        service.adapter(model)
        return facts(model)

    if not service.settings.allow_adapters:
        return routes

    @routes.post("/v1/load_lora_adapter", responses=ERRORS)
    async def load_lora_adapter(form: LoadAdapter) -> AdapterAnswer:
        """Load an adapter from a directory the server can read; requests name it as their model."""
        if form.lora_name == name:
            raise ApiError(400, f"{name!r} is the model itself", param="lora_name", code="invalid_value")
        await service.loop.load_adapter(form.lora_name, form.lora_path)
        return AdapterAnswer(status=f"{form.lora_name} is loaded")

    @routes.post("/v1/unload_lora_adapter", responses=ERRORS)
    async def unload_lora_adapter(form: UnloadAdapter) -> AdapterAnswer:
        if form.lora_name not in engine.adapters:
            raise ApiError(404, f"there is no adapter {form.lora_name!r}", param="lora_name", code="model_not_found")
        await service.loop.unload_adapter(form.lora_name)
        return AdapterAnswer(status=f"{form.lora_name} is unloaded")

    return routes
