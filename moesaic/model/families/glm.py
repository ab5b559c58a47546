"""GLM-4-9B: dense, half of each head turns (neighbouring pairs). GLM-4 (`glm4`) has two more norms in a layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.model.config import ModelConfig
from moesaic.model.families import glm4
from moesaic.model.families.keys import Keys
from moesaic.model.families.places import Place
from moesaic.model.families.traits import Traits

ARCHITECTURE = "GlmForCausalLM"
TRAITS = Traits(rotary_share=0.5, interleaved=True)


def read(keys: Keys) -> ModelConfig:
    return replace(glm4.read(keys), family="glm", post_norms=False)


def write(config: ModelConfig) -> dict[str, Any]:
    return glm4.write(config)


def layouts(config: ModelConfig) -> list[list[Place]]:
    return glm4.layouts(config)
