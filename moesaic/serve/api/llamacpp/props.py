"""GET /props, /slots and /lora-adapters: what the server is and does, in llama.cpp's words."""

from __future__ import annotations

from typing import Any

import moesaic
from moesaic.serve.api.infill import infill_of
from moesaic.serve.api.llamacpp.generation_settings import generation_settings
from moesaic.serve.api.service import Service
from moesaic.serve.core.sampling import Sampling

RANDOM_SEED = 2**32 - 1


def props(service: Service) -> dict[str, Any]:
    tokenizer = service.tokenizer
    params = generation_settings(Sampling(**service.sampling_defaults), RANDOM_SEED)
    return {
        "default_generation_settings": {"n_ctx": service.engine.max_length, "params": params},
        "total_slots": service.engine.scheduler.max_requests,
        "model_alias": service.settings.name,
        "model_path": service.settings.name,  # where it lies concerns nobody but its owner
        "modalities": {"vision": False, "audio": False},
        "chat_template": tokenizer.chat_template or "",
        "bos_token": tokenizer.special("bos_token") or "",
        "eos_token": tokenizer.special("eos_token") or "",
        "build_info": f"moesaic-{moesaic.__version__}",
        "is_sleeping": bool(service.sleeping),
        "infill": infill_of(tokenizer) is not None,
    }


def slots(service: Service) -> list[dict[str, Any]]:
    """As many as requests can run at once. A request is bound to none, so those that run are shown in the first ones;
    of whom they are and what they say is nobody else's."""
    running = service.loop.stats().running
    return [
        {
            "id": number,
            "n_ctx": service.engine.max_length,
            "is_processing": number < running,
        }
        for number in range(service.engine.scheduler.max_requests)
    ]


def lora_adapters(service: Service) -> list[dict[str, Any]]:
    """None is applied unless a request names it."""
    return [{"id": number, "path": name, "scale": 0.0} for number, name in enumerate(service.engine.adapters)]
