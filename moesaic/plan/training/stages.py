"""Layers to pipeline stages, so that the busiest stage has as little to do as can be.

Weights are the parameters a token passes through, which is what time goes by. The output matrix and prediction layers
count on the last stage, so it gets fewer layers, as people arrange it by hand; the others share the rest evenly.
"""

from __future__ import annotations

from functools import lru_cache

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.shape import LayerShape, ModelShape

Stage = dict[LayerShape, int]


@lru_cache(maxsize=10_000)
def divide(model: ModelShape, stages: int) -> list[Stage]:
    """Contiguous layers per stage; the last one also holds the prediction layers."""
    layers = model.layers
    if stages > len(layers):
        raise UserError(
            f"--layout: pp={stages}",
            f"{model.name} has only {len(layers)} layers to divide into stages",
            f"Nearest that works: pp={len(layers)}.",
        )
    cost = {layer: float(_weight(model, layer)) for layer in {*layers, *model.mtp}}
    tail = model.embedding_parameters * (1 + len(model.mtp)) + sum(cost[layer] for layer in model.mtp)
    sums = [0.0]
    for layer in layers:
        sums.append(sums[-1] + cost[layer])

    def busiest(ends: list[int]) -> float:
        parts = [sums[end] - sums[start] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return max([*parts[:-1], parts[-1] + tail])

    # A last stage without layers is worth while where its output matrices are as much as a layer.
    fewest = 0 if stages > 1 and tail >= cost[layers[-1]] else 1
    choices = [
        [*_even(len(layers) - last, stages - 1), len(layers)]
        for last in range(fewest, len(layers) - stages + 2)
    ]  # fmt: skip
    ends = min(choices, key=busiest) if stages > 1 else [len(layers)]
    held: list[Stage] = []
    start = 0
    for end in ends:
        stage: Stage = {}
        for layer in layers[start:end]:
            stage[layer] = stage.get(layer, 0) + 1
        held.append(stage)
        start = end
    for layer in model.mtp:
        held[-1][layer] = held[-1].get(layer, 0) + 1
    return held


def _even(count: int, stages: int) -> list[int]:
    """Ends of `stages` runs of nearly equal length; the first ones, which keep the embedding too, are the shorter."""
    return [count * (index + 1) // stages for index in range(stages)]


def _weight(model: ModelShape, layer: LayerShape) -> int:
    return layer.attention.parameters(model.hidden) + layer.ffn.active_parameters(model.hidden)


def held_parameters(model: ModelShape, layout: ParallelLayout, index: int) -> tuple[float, float]:
    """Of one rank of a stage: parameters outside the experts, and the experts', as tp and ep divide them."""
    plain = expert = 0.0
    for layer, count in divide(model, layout.pp)[index].items():
        plain += count * (layer.attention.parameters(model.hidden) + layer.ffn.other_parameters(model.hidden))
        plain += count * 2 * model.hidden * layout.tp  # norms are on every tensor-parallel rank
        expert += count * layer.ffn.expert_parameters(model.hidden)
    first, last = index == 0, index == layout.pp - 1
    tables = first + (last and not (model.tied and first))
    plain += tables * model.embedding_parameters + first * model.positions * model.hidden
    return plain / layout.tp, expert / layout.ep
