"""DeepSeek-V3.2: DeepSeek-V3 whose queries look only at the tokens a lightning indexer selects (DSA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.model.config import Latent, ModelConfig
from moesaic.model.families import deepseek_v3
from moesaic.model.families.keys import Keys
from moesaic.model.families.latent import read_indexer, write_indexer
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.traits import Traits

ARCHITECTURE = "DeepseekV32ForCausalLM"
TRAITS = Traits(interleaved=True, latent=True, indexer=True, indexer_interleaved=False)


def read(keys: Keys) -> ModelConfig:
    config = deepseek_v3.read(keys)
    assert isinstance(config.attention, Latent)
    return replace(
        config,
        family="deepseek_v32",
        attention=replace(config.attention, indexer=read_indexer(keys, heads=64, interleaved=False)),
        layers=tuple(replace(layer, index="full") for layer in config.layers),
        mtp=tuple(replace(layer, index="full") for layer in config.mtp),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, Latent) or not attention.indexer:
        return {}
    return {**deepseek_v3.write(config), **write_indexer(attention.indexer)}


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names()), places(config, Names(fused_experts=True))]
