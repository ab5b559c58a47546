"""The ranks of a run, from the recipe's `parallel` section; impossible ones are refused before anything starts."""

from __future__ import annotations

import os
from dataclasses import fields

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.whole_only import refuse_dividing
from moesaic.parallel.layout import ParallelLayout, check_sizes, parse_layout, ranks_per_node
from moesaic.parallel.options import ParallelOptions
from moesaic.parallel.pipeline.stages import check_schedule, stages_of
from moesaic.parallel.tensor.partition import check as check_tensor
from moesaic.parallel.world import World, launched
from moesaic.recipe import Recipe
from moesaic.recipe_parallel import ParallelSection
from moesaic.train.optimizers import OptimizerMethod

NAMED = {"once": "rank", "node": "node"}


def layout_of(section: ParallelSection, world: int) -> ParallelLayout:
    """As the recipe says, for so many processes."""
    given = {key: getattr(section, key) for key in ("tp", "cp", "pp", "ep", "zero", "interleave")}
    text = " ".join(f"{key}={value}" for key, value in given.items()) + (f" dp={section.dp}" if section.dp else "")
    place, text = ("parallel.layout", section.layout) if section.layout else ("parallel", text)
    asked = max(section.dp, 1) * section.tp * section.cp * section.pp
    if section.layout:
        asked = parse_layout(section.layout, place=place).devices
    if world == 1 and asked > 1:
        remedy = f"Start it with torchrun --nproc-per-node {asked} -m moesaic train ..."
        raise UserError(place, f"asks for {asked} processes, and this is one", remedy)
    return parse_layout(text, world, place)


def check_parallel(recipe: Recipe, config: ModelConfig) -> ParallelLayout:
    """The layout, if the model and the processes can be divided so."""
    section, settings = recipe.parallel, recipe.train
    layout = layout_of(section, int(os.environ["WORLD_SIZE"]) if launched() else 1)
    experts = {layer.ffn.count for layer in [*config.layers, *config.mtp] if isinstance(layer.ffn, Experts)}
    heads, layers = {config.attention.heads}, len(config.layers)
    check_sizes(layout, "the model", heads=heads, experts=experts, layers=layers, place="parallel")
    if layout.devices > 1:
        refuse_dividing(config, "parallel", "Train it on one device.")
    if layout.tp > 1:
        check_tensor(config, layout.tp)
    if layout.pp > 1:
        options = parallel_options(section)
        check_schedule(section.schedule, stages_of(config, layout, options), settings.accumulate)
    _check_dispatch(section, layout)
    _check_methods(recipe, layout)
    return layout


def check_batch(layout: ParallelLayout, accumulate: int, tokens: int, longest: int, key: str) -> None:
    """Whether a batch has a sequence for every data rank and micro-batch: it may have no more than its longest ones."""
    needed = layout.dp * accumulate * longest
    if layout.devices > 1 and tokens < needed:
        raise UserError(
            key,
            f"{tokens:,} tokens do not give {layout.dp} data ranks {accumulate} sequences of {longest} each",
            f"Nearest that works: {key}={needed}, or parallel.dp={max(1, tokens // (accumulate * longest))}.",
        )


def _check_dispatch(section: ParallelSection, layout: ParallelLayout) -> None:
    if layout.ep == 1:
        return
    if section.exact and section.dispatch != "plain":
        problem = f"dispatch={section.dispatch} adds up a token's experts by {NAMED[section.dispatch]} first"
        raise UserError("parallel.exact", problem, "Leave one of them out.")
    if section.shadow and (section.exact or section.dispatch != "plain"):
        problem = "tokens of copied experts stay at home, which dispatch=plain without exact knows how to do"
        raise UserError("parallel.shadow", problem, "Leave the others out.")
    size = section.node_ranks or ranks_per_node()
    if section.dispatch == "node" and layout.ep % size:
        raise UserError(
            "parallel.dispatch",
            f"experts are shared by ep={layout.ep} ranks, which are not whole nodes of {size}",
            f"Set parallel.ep to a multiple of {size}, or parallel.dispatch=once.",
        )


def _check_methods(recipe: Recipe, layout: ParallelLayout) -> None:
    """What needs more of a sequence, of a matrix or of the parameters than a rank has."""
    divided = [f"{key}={value}" for key in ("tp", "cp") if (value := getattr(layout, key)) > 1]
    if recipe.parallel.exact and divided:
        problem = f"{divided[0]} adds up parts of sums, whose bits are not one process's"
        raise UserError("parallel.exact", problem, "Leave it out, or divide by dp, ep or pp alone.")
    copies = recipe.parallel.replicas
    if copies > 1 and (layout.dp % copies or layout.expert_dp % copies or not layout.zero or recipe.parallel.exact):
        problem = (
            f"{copies} copies need a dp ({layout.dp}) and as many sets of experts ({layout.expert_dp}) as they divide"
        )
        raise UserError("parallel.replicas", problem, "They also need zero=1 or more, and are not exact.")
    if recipe.train.token_drop is not None and divided:
        problem = f"chooses tokens of whole sequences, and {divided[0]} divides them"
        raise UserError("train.token_drop", problem, "Leave it out, or set tp=1 and cp=1.")
    if recipe.optimizer.name == "muon" and layout.tp > 1:
        problem = f"muon works on whole matrices, and tp={layout.tp} divides them"
        raise UserError("optimizer", problem, "Take adamw, or set tp=1 (dp, ep, cp and pp will do).")
    method = recipe.build("optimizer", OptimizerMethod)
    if method.reduces_gradients and layout.devices > 1 and (layout.devices > layout.dp or layout.ep > 1 or layout.zero):
        problem = f"{recipe.optimizer.name} exchanges momenta between ranks that hold all parameters"
        raise UserError("parallel", problem, "Set zero=0, ep=1 and tp=cp=pp=1.")


def parallel_options(section: ParallelSection) -> ParallelOptions:
    keys = [field.name for field in fields(ParallelOptions)]
    return ParallelOptions(**{key: getattr(section, key) for key in keys})


def open_world(recipe: Recipe, layout: ParallelLayout) -> World:
    if not launched():
        return World(hardware.device())
    from moesaic.parallel.mesh import ParallelMesh, join  # a second to import, and most runs are of one process
    from moesaic.parallel.ranks import Ranks

    device = join(recipe.parallel.timeout)
    return Ranks(ParallelMesh(layout, device), parallel_options(recipe.parallel))
