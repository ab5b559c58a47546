"""Whether a checkpoint's tensors are those of its config.json, and where each of them goes."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from moesaic.errors import UserError
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.families import Place, family_for, read_config
from moesaic.model.formats.checkpoint import Source

# What no training made and every reader makes anew.
COUNTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
SHOWN = 10  # of the tensors that are missing, extra or misshapen


def match(source: Source) -> tuple[ModelConfig, list[Place]]:
    """The configuration of a source and where each of its tensors goes, once every tensor is there and fits."""
    where = source.place / "config.json" if source.place.is_dir() else source.place
    config = read_config(source.config, where)
    family = family_for(config.family, source.place)
    unused: tuple[str, ...] = family.unused(config) if hasattr(family, "unused") else ()
    shapes = {
        name: shape
        for name, shape in source.shapes().items()
        if not name.endswith(COUNTED) and not name.startswith(unused)
    }
    _check_counts(config, shapes, where)
    layouts = family.layouts
    if hasattr(family, "as_stored"):
        config = family.as_stored(config, shapes)
    further = f"model.layers.{len(config.layers)}."
    if config.mtp and not any(name.startswith(further) for name in shapes):
        config = replace(config, mtp=())  # declared, but not shipped
    if config.tied and not _head_is_embedding(source, shapes):
        config = replace(config, tied=False)  # as `transformers` does
    candidates: list[list[Place]] = layouts(config)
    places = max(candidates, key=lambda places: sum(place.name in shapes for place in places))
    _compare(places, shapes, source.place)
    return config, [place for place in places if place.name in shapes]


def _check_counts(config: ModelConfig, shapes: dict[str, tuple[int, ...]], where: Path) -> None:
    """Refuse counts that the weights are far from filling before lists of that length are made."""
    layers = config.layers + config.mtp
    experts = [layer.ffn for layer in layers if isinstance(layer.ffn, Experts)]
    needed = sum(ffn.count * 3 * ffn.hidden * config.hidden for ffn in experts)
    if len(layers) > len(shapes) or needed > 10 * sum(map(prod, shapes.values())):
        claimed = f"{len(layers)} layers" + (f" and {sum(ffn.count for ffn in experts)} experts" if experts else "")
        problem = f"{claimed} are far more than the {len(shapes)} tensors there can be"
        raise UserError(where, problem, "The weights do not belong to this config.json.")


def _head_is_embedding(source: Source, shapes: dict[str, tuple[int, ...]]) -> bool:
    names = "model.embed_tokens.weight", "lm_head.weight"
    if any(name not in shapes for name in names) or shapes[names[0]] != shapes[names[1]]:
        return True  # or something is wrong, which the comparison with the configuration will name
    return torch.equal(source.tensor(names[0]), source.tensor(names[1]))


def _compare(places: list[Place], shapes: dict[str, tuple[int, ...]], where: Path) -> None:
    expected = {place.name: place for place in places}
    missing = [place.name for place in places if place.name not in shapes and not place.copy]
    extra = [name for name in shapes if name not in expected]
    wrong = [
        f"{name} is {_shape(shapes[name])}, not {_shape(place.shape)}"
        for name, place in expected.items()
        if name in shapes and shapes[name] != place.shape
    ]
    for problem, names in (("missing", missing), ("misshapen", wrong), ("extra", extra)):
        if names:
            shown = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
            count = f"{len(names)} tensor{'s' if len(names) > 1 else ''} {problem}"
            raise UserError(where, f"{count}: {shown}", "The weights do not belong to this config.json.")


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a single number"
