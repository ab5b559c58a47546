"""GET /v1/models, and LoRA adapters loaded and unloaded while serving."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from moesaic.serve.api.errors import ERRORS, ApiError
from moesaic.serve.api.messages import model_info
from moesaic.serve.api.schema.sampling import RequestModel
from moesaic.serve.api.service import Service

ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # an admin's, unless clients may


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "moesaic"
    root: str
    parent: str | None = None
    aliases: list[str] = Field(default=[], description="Other names of the same model.")
    max_model_len: int
    sampling: dict[str, float] = Field(description="The model's own defaults, unless a request sets others.")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class LoadAdapter(RequestModel):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool = Field(default=False, description="Replace one that has this name.")


class UnloadAdapter(RequestModel):
    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(default=None, description="Of no meaning here; vLLM's clients may send it.")


class AdapterResponse(BaseModel):
    status: str


def router(service: Service) -> APIRouter:
    routes = APIRouter(tags=["models"])
    engine = service.engine
    loading = asyncio.Lock()  # two loads of one name, one after the other

    @routes.get("/v1/models", responses=ERRORS, response_model=ModelList)
    @routes.get("/models", include_in_schema=False, response_model=ModelList)
    async def models(request: Request) -> ModelList | JSONResponse:
        """The models by all their names, and the adapters that are loaded."""
        cards = [card(one, name) for one in service.all for name in (*one.names, *one.engine.adapters)]
        if model_info.wanted(request):
            page = model_info.page([model_info.info(one.id, one.created, one.max_model_len) for one in cards])
            return JSONResponse(page.model_dump())
        return ModelList(data=cards)

    @routes.get("/v1/models/{model:path}", responses=ERRORS, response_model=ModelCard)
    async def model(model: str, request: Request) -> ModelCard | JSONResponse:
        service.adapter(model)
        if model_info.wanted(request):
            return JSONResponse(model_info.info(model, service.started, service.context).model_dump())
        return card(service, model)

    if not (service.settings.allow_adapters or service.settings.admin_keys.hashes):
        return routes

    @routes.post("/v1/load_lora_adapter", responses=ERRORS)
    async def load_lora_adapter(body: LoadAdapter) -> AdapterResponse:
        """Load an adapter from a directory the server can read; requests name it as their model."""
        name = body.lora_name
        async with loading:
            if any(name in one.names or (one is not service and one.knows(name)) for one in service.all):
                raise ApiError(400, f"{name!r} is the name of a model", param="lora_name", code="invalid_value")
            if name in engine.adapters and not body.load_inplace:
                message = f"the adapter {name!r} is loaded. Give load_inplace: true to replace it, or unload it first"
                raise ApiError(400, message, param="lora_name", code="already_loaded")
            if not await asyncio.to_thread(Path(body.lora_path).is_dir):
                raise ApiError(404, "lora_path is no directory here", param="lora_path", code="adapter_not_found")
            await service.loop.load_adapter(name, body.lora_path)
        return AdapterResponse(status=f"{name} is loaded")

    @routes.post("/v1/unload_lora_adapter", responses=ERRORS)
    async def unload_lora_adapter(body: UnloadAdapter) -> AdapterResponse:
        """Forget an adapter; requests that have it finish with it."""
        async with loading:
            if body.lora_name not in engine.adapters:
                message = f"there is no adapter {body.lora_name!r}"
                raise ApiError(404, message, param="lora_name", code="model_not_found")
            await service.loop.unload_adapter(body.lora_name)
        return AdapterResponse(status=f"{body.lora_name} is unloaded")

    return routes


def card(service: Service, name: str) -> ModelCard:
    own = service.settings.name
    return ModelCard(
        id=name,
        created=service.started,
        root=own,
        parent=None if name in service.names else own,
        aliases=[one for one in service.names if one != name] if name in service.names else [],
        max_model_len=service.context,
        sampling=service.sampling_defaults,
    )
