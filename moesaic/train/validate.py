"""Validate a recipe before any work is done: every method it names is built once, and dropped."""

from __future__ import annotations

from pathlib import Path

from moesaic.data.columns import check_column, columns_of
from moesaic.data.curricula import Curriculum
from moesaic.data.mixture import phases_of
from moesaic.data.stream import Stream, TokenStream
from moesaic.data.tokenizer_training import load_tokenizer
from moesaic.errors import UserError
from moesaic.model.config import ModelConfig
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.recipe import COMMAND_LINE, Recipe
from moesaic.train.architecture import architecture
from moesaic.train.init import check_tokens, check_vocab
from moesaic.train.layer_runners.compose import LayerRunners
from moesaic.train.objectives import Objective
from moesaic.train.optimizers import OptimizerMethod
from moesaic.train.schedules import Curve, Schedule, curve


def check(recipe: Recipe) -> None:
    """A recipe to pretrain with."""
    recipe, _ = fit_warmup(recipe)
    config = model_config(recipe)
    if recipe.train.init and (unused := [key for key in recipe.overridden_keys("model") if key != "model.vocab"]):
        problem = f"is not used: the model is that of train.init, {recipe.train.init}, as it is"
        raise UserError(f"{COMMAND_LINE}: {unused[0]}", problem, "Leave it out, or train.init.")
    check_learning(recipe, config)
    recipe.build("train.objective", Objective).check()
    if recipe.data.curriculum is not None:
        recipe.build("data.curriculum", Curriculum)
    phases_of(recipe.data)
    if recipe.data.sequence_length > config.context:
        problem = f"{recipe.data.sequence_length} tokens, and the model's context has {config.context}"
        remedy = "Lower it." if recipe.train.init else "Lower it, or raise model.context."
        raise UserError("data.sequence_length", problem, remedy)
    if (warmup := recipe.data.length_warmup) and warmup.start >= recipe.data.sequence_length:
        problem = f"starts at {warmup.start} tokens, and data.sequence_length is only {recipe.data.sequence_length}"
        raise UserError("data.length_warmup.start", problem, "Lower it, or leave out data.length_warmup.")
    if recipe.train.evaluate_every and not recipe.data.held_out and not recipe.train.data:
        raise UserError("train.evaluate_every", "no text is held out to evaluate on", "Raise data.held_out.")
    if not recipe.train.data:
        _check_tokenizer(recipe)


def _check_tokenizer(recipe: Recipe) -> None:
    """Before data is prepared with a tokenizer that does not fit the model."""
    init, given = recipe.train.init, recipe.data.tokenizer
    if init is None:
        if given:
            check_vocab(recipe.model.vocab, load_tokenizer(given))
        return
    own = Tokenizer.from_files(open_checkpoint(init).files, Path(init))
    if own is not None and given:
        check_tokens(init, own, load_tokenizer(given), given)
    elif own is not None and len(own) > recipe.model.vocab:  # the same text would give the same one, but not this
        problem = f"the {len(own):,} tokens of {init} are not those of one made from the text (model.vocab is smaller)"
        raise UserError("data.tokenizer", problem, f"Add data.tokenizer={init}.")


def check_columns(recipe: Recipe) -> None:
    """Before data is prepared: whether it will have the columns that curriculum and phases need."""
    if recipe.data.curriculum is not None:
        needs = recipe.build("data.curriculum", Curriculum).needs
        if needs is not None:
            check_column(needs, recipe.data, "data.curriculum")
    for number, phase in enumerate(phases_of(recipe.data)):
        kept = [source for source in recipe.data.sources if phase.keep.get(source.name, 1) < 1]
        for source in kept:
            if "quality" not in columns_of(source, recipe.data):
                problem = "keeps the best by quality, and the data would have no such column: data.quality is null"
                raise UserError(f"data.phases.{number}.keep.{source.name}", problem, "Name a method there.")


def check_learning(recipe: Recipe, config: ModelConfig) -> None:
    """Objective, optimizer, schedule and layer runners, for a model of this config."""
    recipe.build("train.objective", Objective)
    recipe.build("optimizer", OptimizerMethod)
    rates(recipe)
    LayerRunners(recipe.train, config)


def model_config(recipe: Recipe) -> ModelConfig:
    if recipe.train.init is None:
        return architecture(recipe.model, bos=None, eos=(), pad=None)
    return match(open_checkpoint(recipe.train.init))[0]


def rates(recipe: Recipe) -> Curve:
    """The learning rate of every step, as a share of the peak."""
    warmup, steps = recipe.train.warmup_steps, recipe.train.steps
    if warmup >= steps:
        raise UserError("train.warmup_steps", f"{warmup} of {steps} steps leave none after it", "Lower it.")
    return curve(recipe.build("schedule", Schedule), steps, warmup)


def fit_warmup(recipe: Recipe) -> tuple[Recipe, bool]:
    """The recipe, and whether its warmup was shortened: to a tenth of the run, where the command line sets fewer steps
    than the warmup in the file has. A warmup set on the command line is refused instead."""
    steps_from, warmup_from = (recipe.origin(("train", key)) for key in ("steps", "warmup_steps"))
    if recipe.train.warmup_steps < recipe.train.steps or steps_from != COMMAND_LINE or warmup_from == COMMAND_LINE:
        return recipe, False
    return recipe.changed(train={"warmup_steps": recipe.train.steps // 10}), True


def fit_to_data(recipe: Recipe, data: Stream) -> tuple[Recipe, bool]:
    """The recipe, and whether its run was shortened to where its data ends, so that the schedule ends there too."""
    if not isinstance(data, TokenStream) or (steps := data.batches(recipe.train.steps)) == recipe.train.steps:
        return recipe, False
    if not steps:
        problem = f"the sources give {data.plan.tokens:,} tokens within their max_epochs, not a batch"
        raise UserError("data.sources", problem, "Raise max_epochs, or lower train.batch_tokens.")
    return recipe.changed(train={"steps": steps}), True
