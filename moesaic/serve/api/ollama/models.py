"""Which models there are, in Ollama's form: /api/tags, /api/show, /api/ps. They are those the server was started with;
none comes or goes by this API."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import torch

from moesaic.model.config import GroupedQuery
from moesaic.serve.api.infill import infill_of
from moesaic.serve.api.ollama.names import known, tagged
from moesaic.serve.api.ollama.translation import can_think
from moesaic.serve.api.service import Service

# Of Ollama, whose clients ask for it to know what its API can do; this is the one that this room was written after.
VERSION = "0.12.6"
NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded


def names(service: Service) -> list[tuple[Service, str]]:
    return [(one, name) for one in service.all for name in (*one.names, *one.engine.adapters)]


def tags(service: Service) -> dict[str, Any]:
    return {"models": [entry(one, name) for one, name in names(service)]}


def running(service: Service) -> dict[str, Any]:
    """All are loaded."""
    more = {"expires_at": NEVER}
    found = []
    for one, name in names(service):
        size = size_of(one)
        device = one.engine.model.device.type
        on_gpu = device == "cuda" or (device == "meta" and torch.cuda.is_available())  # meta: it is in another process
        found.append(entry(one, name) | more | {"size_vram": size if on_gpu else 0, "context_length": one.context})
    return {"models": found}


def entry(service: Service, name: str) -> dict[str, Any]:
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": started(service),
        "size": size_of(service),
        "digest": hashlib.sha256(f"{name} {service.fingerprint}".encode()).hexdigest(),
        "details": details(service, name),
        "capabilities": capabilities(service),
    }


def show(service: Service, model: str) -> dict[str, Any]:
    name = known(service, model)
    config, tokenizer = service.engine.model.config, service.engine.tokenizer
    family, attention = config.family, config.attention
    template = (tokenizer.chat_template if tokenizer is not None else None) or ""
    info: dict[str, Any] = {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": parameter_count(service),
        f"{family}.block_count": len(config.layers),
        f"{family}.context_length": config.context,
        f"{family}.embedding_length": config.hidden,
        f"{family}.vocab_size": config.vocab,
        f"{family}.attention.head_count": attention.heads,
        "tokenizer.ggml.bos_token_id": config.bos,
        "tokenizer.ggml.eos_token_id": config.eos[0] if config.eos else None,
    }
    if isinstance(attention, GroupedQuery):
        info[f"{family}.attention.head_count_kv"] = attention.kv_heads
    parameters = "\n".join(f"{key:<30} {value}" for key, value in service.sampling_defaults.items())
    return {
        "modelfile": f"# Served by Moesaic; not made of a Modelfile\nFROM {name}\n",
        "parameters": parameters,
        "template": template,
        "details": details(service, name),
        "model_info": {key: value for key, value in info.items() if value is not None},
        "capabilities": capabilities(service),
        "modified_at": started(service),
    }


def details(service: Service, name: str) -> dict[str, Any]:
    config = service.engine.model.config
    return {
        "parent_model": service.settings.name if name in service.engine.adapters else "",
        "format": "safetensors",
        "family": config.family,
        "families": [config.family],
        "parameter_size": short(parameter_count(service)),
        "quantization_level": {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(
            dtype_of(service), "unknown"
        ),
        "context_length": config.context,
        "embedding_length": config.hidden,
    }


def capabilities(service: Service) -> list[str]:
    tokenizer = service.engine.tokenizer
    found = ["completion"]
    if tokenizer is not None and tokenizer.chat_template is not None and tokenizer.takes_tools:
        found.append("tools")
    if tokenizer is not None and infill_of(tokenizer) is not None:
        found.append("insert")
    if tokenizer is not None and can_think(service):
        found.append("thinking")
    return [*found, "embedding"]


def parameter_count(service: Service) -> int:
    return sum(parameter.numel() for parameter in service.engine.model.parameters())


def size_of(service: Service) -> int:
    """In bytes, as it lies in memory."""
    model = service.engine.model
    if model.device.type == "meta":
        return parameter_count(service) * getattr(torch, model.config.dtype).itemsize
    return sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())


def dtype_of(service: Service) -> str:
    model = service.engine.model
    return model.config.dtype if model.device.type == "meta" else str(model.dtype).removeprefix("torch.")


def short(count: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)


def started(service: Service) -> str:
    return datetime.fromtimestamp(service.started, UTC).isoformat().replace("+00:00", "Z")
