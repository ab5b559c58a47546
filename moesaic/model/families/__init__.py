"""The architectures a model directory may hold, one file each: config keys and tensor names, nothing else.

A family is a module with `ARCHITECTURE` (the class name `transformers` uses), `read(keys)` and `write(config)` between
config.json and `ModelConfig`, `layouts(config)`: the ways its tensors are named on disk, the one we write first,
`TRAITS` for training from scratch and, where llama.cpp has the family, `GGUF_NAMES`. Where its checkpoints hold tensors
that no model here has, `unused(config)` says how their names begin; where tensors tell what config.json does not,
`as_stored(config, names)` is the config they tell. A new family is one such file.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from moesaic.errors import UserError
from moesaic.model.config import ModelConfig
from moesaic.model.families.keys import Keys
from moesaic.model.families.multimodal import language_model
from moesaic.model.families.places import Place

__all__ = ["Keys", "Place", "families", "family_for", "known", "read_config", "write_config"]

# Shared by the families, not families themselves.
_SHARED = {"encoders", "keys", "latent", "multimodal", "places", "sigmoid", "traits"}


def known() -> list[str]:
    return list(_names(tuple(__path__)))


@cache  # asked for every tensor of a checkpoint
def _names(folders: tuple[str, ...]) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(folders) if module.name not in _SHARED)


def family_for(name: str, place: object) -> ModuleType:
    if name not in known():
        raise UserError(place, f"architecture {name[:60]!r} is not known", f"Known: {', '.join(known())}.")
    return importlib.import_module(f"{__name__}.{name}")


def families() -> list[ModuleType]:
    return [family_for(name, name) for name in known()]


def read_config(raw: dict[str, Any], place: object) -> ModelConfig:
    """config.json's content as a ModelConfig, of a multimodal release that of its language model; what is missing,
    mistyped or impossible is a UserError naming `place`."""
    raw = language_model(raw, place)
    keys = Keys(raw, place)
    family = family_for(keys.text("model_type"), place)
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        problem = f"the weights are quantized ({str(method)[:60]!r})"
        raise UserError(place, problem, "Convert them to plain weights first.")
    try:
        config: ModelConfig = family.read(keys)
    except UserError as error:
        if error.place == str(place):
            raise
        raise UserError(place, f"{error.place}: {error.problem}", error.remedy) from None
    return config


def write_config(config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
    """config.json's content for a model, and the config as it will be read back.

    A model its family cannot express (a pyramid of experts, a residual expert) is written in our own architecture.
    """
    family = family_for(config.family, "config")
    raw = family.write(config)
    if family.__name__.endswith(".moesaic") or _reads_back(raw, config):
        return config, {"architectures": [family.ARCHITECTURE], "model_type": config.family, **raw}
    return write_config(replace(config, family="moesaic"))


def _reads_back(raw: dict[str, Any], config: ModelConfig) -> bool:
    try:
        return read_config({"model_type": config.family, **raw}, "config.json") == config
    except UserError:
        return False
