"""From a recipe and a model to an aligned model: its stages one after the other, each from what the last one made.

A stage that is done is not done again; one that was stopped is resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from moesaic.align.accuracy import Accuracy
from moesaic.align.plot import plot_alignment
from moesaic.align.stage_list import check_resumable, place_of, resolved
from moesaic.align.stages import Stage
from moesaic.atomic import exclusive
from moesaic.data.stream import Stream
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.kernels.interface import Mode
from moesaic.methods import Method, renamed
from moesaic.model import directory, lineage
from moesaic.model.config import ModelConfig
from moesaic.model.encoder import refuse_encoder
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.model.value_head import give_head
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.world import World
from moesaic.recipe import Recipe
from moesaic.train import init
from moesaic.train.checkpoints import SHOWN
from moesaic.train.loop import train
from moesaic.train.ranks import check_parallel, open_world
from moesaic.train.report.metrics import EVENTS, METRICS
from moesaic.train.resume import run_dtype
from moesaic.train.run import Run
from moesaic.train.validate import check_learning


def align(recipe: Recipe, model: Path, out: Path, *, quiet: bool = False) -> dict[str, Any]:
    """Returns each stage's summary. The last stage's run is `out` itself; the others are under `out/stages`."""
    recipe, stages, names, layout = checked(recipe, model, out)
    world = open_world(recipe, layout)
    with exclusive(out) if world.is_main else nullcontext():
        check_resumable(recipe, stages, names, model, out)
        return {"directory": str(out), "stages": _run(recipe, stages, model, out, world, quiet=quiet)}


def checked(recipe: Recipe, model: Path, out: Path) -> tuple[Recipe, list[Stage], list[str], ParallelLayout]:
    """The stages with their names, once what can be seen to be wrong with them is refused, and the layout."""
    named = recipe.align.stages
    if not named:
        raise UserError(recipe.origin(("align",)), "align.stages is empty", "Name at least one stage.")
    if model.resolve() == out.resolve():
        raise UserError(out, "is the model itself", "Name another --out.")
    if recipe.train.dtype == "fp8":
        problem = "fp8 is for moesaic train: what is aligned is trained as the engine samples from it"
        raise UserError("train.dtype", problem, "Set it to bfloat16, or auto.")
    named = tuple(renamed(each, Stage, recipe.origin(("align", "stages"))) for each in named)
    recipe = recipe.changed(align={"stages": named})
    for number in range(len(named)):
        recipe.build(f"align.stages.{number}", Stage).check()
    names = [each.name for each in named]
    named = tuple(Method(each.name, resolved(each.options, out, names, n)) for n, each in enumerate(named))
    there = recipe.changed(align={"stages": named})
    stages = [there.build(f"align.stages.{number}", Stage) for number in range(len(named))]
    source = open_checkpoint(model)
    config, _ = match(source)
    refuse_encoder(config, model, "there is nothing to align")
    for stage in stages:
        check_learning(of_stage(recipe, stage, model), config)
    layout = check_ranks(recipe, stages, names, config)
    for number, stage in enumerate(stages):
        if stage.lora is not None:
            stage.lora.check(recipe, source, config, layout, f"align.stages.{number}.lora")
    return recipe, stages, names, layout


def check_ranks(recipe: Recipe, stages: Sequence[Stage], names: Sequence[str], config: ModelConfig) -> ParallelLayout:
    """The layout, if these stages can be trained under it."""
    layout = check_parallel(recipe, config)
    if layout.devices == 1:
        return layout
    for number, (stage, name) in enumerate(zip(stages, names, strict=True)):
        key = f"align.stages.{number}"
        if not stage.on_ranks:
            raise UserError(key, f"{name} is trained by one process", "Run it without torchrun.")
        stage.check_ranks(layout, recipe.train.accumulate, config.context, key)
    if layout.devices > layout.dp:
        raise UserError("parallel", "alignment divides batches and experts only", "Set tp=cp=pp=1.")
    return layout


def _run(
    recipe: Recipe, stages: Sequence[Stage], model: Path, out: Path, world: World, *, quiet: bool
) -> list[dict[str, Any]]:
    named = recipe.align.stages
    names = [each.name for each in named]
    summaries = []
    for number, (stage, method) in enumerate(zip(stages, named), 1):
        place = place_of(number, out, names)
        with world.watched(place, (METRICS, EVENTS), EVENTS):
            run = begin(recipe, stage, method.name, model, place, world, quiet=quiet)
            world.resumed(run.step, run.report.dropped, run.report.note)
            train(run)
            world.barrier()  # what the next stage reads is there
        if world.is_main:
            plot_alignment(place)
        summaries.append({"stage": method.name} | run.summary)
        if run.step < stage.steps:  # stopped
            break
        if stage.continues:
            model = place
    return summaries


def begin(
    recipe: Recipe, stage: Stage, name: str, model: Path, out: Path, world: World | None = None, *, quiet: bool = False
) -> Run:
    world = world or World(hardware.device())
    device = world.device
    before = run_dtype(out)
    # On a CPU as it is stored: there, bits are promised in float32 only.
    as_stored = device.type == "cpu" and before == recipe.train.dtype == "auto"
    dtype = None if as_stored else init.dtype(recipe, device, before)
    # Only what learns from the engine's own numbers needs them to the bit, and it costs the trainer time.
    mode: Mode = "invariant" if recipe.align.invariant and stage.exact else "fast"
    initial = _load(world, model, dtype, mode)
    init.check_trainable(initial, model)
    if initial.tokenizer is None or initial.tokenizer.chat_template is None:
        raise UserError(model, "has no tokenizer with a chat template", "Alignment needs one.")
    if stage.lora is not None:
        stage.lora.attach(initial, stage.seed)
    if stage.value_head:
        give_head(initial).requires_grad_()
    else:
        initial.value = None  # a reward model's head is not carried on untrained

    def open_stream(model: Model) -> Stream:
        with world.evaluating(model):
            return stage.open(model, out, world)

    with world.evaluating(initial):
        measure = stage.measure(initial) if stage.evaluate_every else None
        if isinstance(measure, Accuracy):
            measure.out = out if world.is_main else None
            if measure.shows and not (out / SHOWN).exists():  # a run that resumes has these pictures
                measure(initial)
    run = Run(
        of_stage(recipe, stage, model),
        out,
        quiet=quiet,
        name=name,
        initial=(initial, dict(initial.tokenizer.files), lineage.read(model)),
        stream=open_stream,
        measure=measure,
        world=world,
        phases=stage.phases,
    )
    if stage.lora is not None:
        run.report.note(stage.lora.said(initial), kind="lora")
    return run


def _load(world: World, model: Path, dtype: torch.dtype | None, mode: Mode) -> Model:
    """The model, or this rank's share of it."""
    if world.ranks == 1:
        whole = directory.load(model, dtype=dtype, device=world.device)
        whole.mode = mode
        return whole
    source = open_checkpoint(model)
    config, _ = match(source)
    share = world.build(config, dtype or hardware.dtype(world.device, getattr(torch, config.dtype)), source, mode)
    share.tokenizer = Tokenizer.from_files(source.files, source.place)
    return share


def of_stage(recipe: Recipe, stage: Stage, model: Path) -> Recipe:
    """The recipe of a stage's run."""
    optimizer = stage.optimizer or recipe.optimizer
    if stage.lr is not None:
        optimizer = Method(optimizer.name, {**optimizer.options, "lr": stage.lr})
    return recipe.changed(
        train={
            "init": str(model),
            "steps": stage.steps,
            "tokens": None,
            "save_every": stage.save_every,
            "evaluate_every": stage.evaluate_every,
            "objective": stage.objective_method(),
            "seed": stage.seed,
            "warmup_steps": min(recipe.train.warmup_steps, stage.steps // 10),
        }
    ).model_copy(update={"optimizer": optimizer})
