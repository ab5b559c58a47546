"""Configs of small mixtures that tests of training initialize themselves."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.model.config import GroupedQuery, Layer, ModelConfig, Rope


def small_mixture(
    vocab: int,
    hidden: int,
    attention: GroupedQuery,
    rope: Rope,
    layers: Sequence[Layer],
    mtp: tuple[Layer, ...] = (),
    init_std: float = 0.2,
) -> ModelConfig:
    return ModelConfig(
        "glm4_moe", vocab, hidden, attention, rope=rope, layers=tuple(layers), mtp=mtp, init_std=init_std
    )
