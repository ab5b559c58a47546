"""Kimi-K2: DeepSeek-V3 in other sizes, released under a name of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.model.config import ModelConfig
from moesaic.model.families import deepseek_v3
from moesaic.model.families.keys import Keys
from moesaic.model.families.places import Place

ARCHITECTURE = deepseek_v3.ARCHITECTURE  # its checkpoints say so too
TRAITS = deepseek_v3.TRAITS


def read(keys: Keys) -> ModelConfig:
    return replace(deepseek_v3.read(keys), family="kimi_k2")


def write(config: ModelConfig) -> dict[str, Any]:
    return deepseek_v3.write(config)


def layouts(config: ModelConfig) -> list[list[Place]]:
    return deepseek_v3.layouts(config)
