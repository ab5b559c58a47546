"""GLM-5: latent attention whose queries look only at the tokens a lightning indexer selects (DSA); layers may share
the selection of the last layer that made one (IndexCache)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.model.config import Dense, Latent, ModelConfig
from moesaic.model.families.keys import Keys, write_every, write_rope
from moesaic.model.families.latent import read_indexer, read_latent, write_indexer, write_latent
from moesaic.model.families.places import Names, Place, places
from moesaic.model.families.sigmoid import read_layers, write_layers
from moesaic.model.families.traits import Traits

ARCHITECTURE = "GlmMoeDsaForCausalLM"
TRAITS = Traits(interleaved=True, latent=True, indexer=True)


def read(keys: Keys) -> ModelConfig:
    attention = replace(read_latent(keys), indexer=read_indexer(keys, heads=32, interleaved=True))
    context = keys.integer("max_position_embeddings", default=202752)
    layers, mtp = read_layers(keys, dense_first=3, groups=1, top_groups=1, scale=2.5)
    index = _index_kinds(keys, len(layers))
    return ModelConfig(
        family="glm_moe_dsa",
        attention=attention,
        rope=keys.rope(attention.rope_size, context=context, interleaved=True),
        layers=tuple(
            replace(layer, index="shared" if kind == "shared" else "full")
            for layer, kind in zip(layers, index, strict=False)
        ),
        mtp=tuple(replace(layer, index="full") for layer in mtp),
        **keys.every(context, eps=1e-5),
    )


def _index_kinds(keys: Keys, count: int) -> list[str]:
    kinds = keys.choices("indexer_types", {"full", "shared"}, count)
    if kinds:
        return kinds
    pattern = keys.raw.get("index_topk_pattern")
    if isinstance(pattern, str) and set(pattern) <= {"F", "S"} and len(pattern) >= count:
        return ["full" if letter == "F" else "shared" for letter in pattern]
    kinds = keys.choices("index_topk_pattern", {"full", "shared"}, count)
    if kinds:
        return kinds
    every, offset = (
        max(keys.integer("index_topk_freq", default=1), 1),
        keys.integer("index_skip_topk_offset", default=2),
    )
    return ["shared" if max(number - offset + 1, 0) % every else "full" for number in range(count)]


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, Latent) or not attention.indexer or isinstance(config.layers[-1].ffn, Dense):
        return {}
    return {
        **write_every(config),
        **write_rope(config.rope, attention.rope_size),
        **write_layers(config),
        **write_latent(attention),
        "mlp_layer_types": ["dense" if isinstance(layer.ffn, Dense) else "sparse" for layer in config.layers],
        **write_indexer(attention.indexer),
        "indexer_types": [layer.index for layer in config.layers],
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    return [places(config, Names()), places(config, Names(fused_experts=True))]
