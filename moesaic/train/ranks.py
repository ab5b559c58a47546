"""The ranks of a run, from the recipe's `parallel` section; impossible ones are refused before anything starts."""

from __future__ import annotations

import os

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.config import Experts, ModelConfig
from moesaic.parallel.layout import ParallelLayout, check_sizes, parse_layout
from moesaic.parallel.world import World, launched
from moesaic.recipe import Recipe
from moesaic.recipe_sections import ParallelSection


def layout_of(section: ParallelSection, world: int) -> ParallelLayout:
    """As the recipe says, for so many processes."""
    if section.layout:
        return parse_layout(section.layout, world, "parallel.layout")
    given = {key: getattr(section, key) for key in ("tp", "cp", "pp", "ep", "zero", "interleave")}
    text = " ".join(f"{key}={value}" for key, value in given.items())
    return parse_layout(text + (f" dp={section.dp}" if section.dp else ""), world, "parallel")


def check_parallel(recipe: Recipe, config: ModelConfig) -> ParallelLayout:
    """The layout, if the model, the data and the processes can be divided so."""
    world = int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1
    section, settings = recipe.parallel, recipe.train
    layout = layout_of(section, world)
    experts = {layer.ffn.count for layer in [*config.layers, *config.mtp] if isinstance(layer.ffn, Experts)}
    check_sizes(
        layout,
        "the model",
        heads={config.attention.heads},
        experts=experts,
        layers=len(config.layers),
        place="parallel",
    )
    needed = layout.dp * settings.accumulate * recipe.data.sequence_length
    if world > 1 and settings.batch_tokens < needed:
        most = max(1, settings.batch_tokens // (settings.accumulate * recipe.data.sequence_length))
        raise UserError(
            "train.batch_tokens",
            f"{settings.batch_tokens:,} tokens do not give {layout.dp} data ranks"
            f" {settings.accumulate} sequences of {recipe.data.sequence_length} each",
            f"Nearest that works: train.batch_tokens={needed}, or parallel.dp={most}.",
        )
    return layout


def open_world(recipe: Recipe, config: ModelConfig) -> World:
    layout = check_parallel(recipe, config)
    if not launched():
        return World(hardware.device())
    from moesaic.parallel.mesh import ParallelMesh, join  # a second to import, and most runs are of one process
    from moesaic.parallel.options import ParallelOptions
    from moesaic.parallel.ranks import Ranks

    section = recipe.parallel
    device = join(section.timeout)
    keys = ("exact", "chunks", "dispatch", "tiles", "schedule", "stages")
    options = ParallelOptions(**{key: getattr(section, key) for key in keys})
    return Ranks(ParallelMesh(layout, device), options)
