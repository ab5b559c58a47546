"""Validate a recipe before any work is done: every method it names is built once, and dropped."""

from __future__ import annotations

from pathlib import Path

from moesaic.data.columns import check_column, columns_of, scorers
from moesaic.data.curricula import Curriculum
from moesaic.data.mixture import phases_of
from moesaic.data.record_rows import row_size
from moesaic.data.reuse import load_reuse
from moesaic.data.stream import Stream, TokenStream
from moesaic.data.tokenizer_training import SPECIAL, load_tokenizer
from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.model.config import Infilling, Latent, ModelConfig
from moesaic.model.encoder import refuse_encoder
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.parallel.world import launched
from moesaic.recipe import COMMAND_LINE, Recipe
from moesaic.recipe_offload import check_ranks
from moesaic.train import float8, indexers
from moesaic.train.adversarial import adversarial
from moesaic.train.architecture import architecture
from moesaic.train.constraints import Constraint
from moesaic.train.init import check_plain, check_tokens, check_vocab
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
    _check_objective(recipe, config)
    if recipe.train.constraint is not None:
        recipe.build("train.constraint", Constraint).check()
    if recipe.data.curriculum is not None:
        recipe.build("data.curriculum", Curriculum)
    phases_of(recipe.data)
    if recipe.train.dtype == "fp8":
        float8.check(config, hardware.device())
    if (size := row_size(recipe.data)) is not None:
        check_rows(recipe, "data.sources: rows")
        if size != config.hidden:
            problem = f"{size} numbers in a row, and {config.hidden} in the model's hidden states"
            raise UserError("data.sources: rows.size", problem, "The encoder of rows must make as many.")
    load_reuse(recipe.data.reuse)
    if recipe.data.sequence_length > config.context:
        problem = f"{recipe.data.sequence_length} tokens, and the model's context has {config.context}"
        remedy = "Lower it." if recipe.train.init else "Lower it, or raise model.context."
        raise UserError("data.sequence_length", problem, remedy)
    if (warmup := recipe.data.length_warmup) and warmup.start >= recipe.data.sequence_length:
        problem = f"starts at {warmup.start} tokens, and data.sequence_length is only {recipe.data.sequence_length}"
        raise UserError("data.length_warmup.start", problem, "Lower it, or leave out data.length_warmup.")
    if recipe.train.evaluate_every and not recipe.data.held_out and not recipe.train.data:
        raise UserError("train.evaluate_every", "no text is held out to evaluate on", "Raise data.held_out.")


def check_data(recipe: Recipe) -> None:
    """Before data is prepared: that it will be what the run needs."""
    tokenizer = _tokenizer(recipe)
    for option, token in recipe.build("train.objective", Objective).special_tokens().items():
        if token not in SPECIAL if tokenizer is None else tokenizer.fast.token_to_id(token) is None:
            problem = f"the tokenizer has no token {token!r}"
            raise UserError(f"train.objective.{option}", problem, "Name one that it has.")
    scorers(recipe)
    check_columns(recipe)


def _tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The one that text will be prepared with, if it fits the model; None if one is to be trained."""
    init, given = recipe.train.init, recipe.data.tokenizer
    made = load_tokenizer(given) if given else None
    if init is None:
        if made is not None:
            check_vocab(recipe.model.vocab, made)
        return made
    own = Tokenizer.from_files(open_checkpoint(init).files, Path(init))
    if own is not None and made is not None:
        check_tokens(init, own, made, given)
    elif own is not None:
        problem = f"one would be trained on the text, and {init} knows the {len(own):,} tokens of its own"
        raise UserError("data.tokenizer", problem, f"Add data.tokenizer={init}.")
    return made


def _check_objective(recipe: Recipe, config: ModelConfig) -> None:
    objective = recipe.build("train.objective", Objective)
    if not objective.of_text:
        problem = f"{recipe.train.objective.name} learns from answers, and a run of moesaic train has text alone"
        raise UserError("train.objective", problem, "Name it in a stage of moesaic align.")
    objective.check()
    objective.check_model(config)


def check_columns(recipe: Recipe) -> None:
    """Before data is prepared: whether it will have the columns that curriculum and phases need."""
    if recipe.data.mix_by is not None:
        check_column(recipe.data.mix_by, recipe.data, "data.mix_by")
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
    adversarial(recipe)
    if recipe.train.constraint is not None:
        recipe.build("train.constraint", Constraint)
        if recipe.train.average is not None:
            problem = "an average of weights that keep to it does not keep to it"
            raise UserError("train.constraint", problem, "Leave out train.average, or this.")
    recipe.build("optimizer", OptimizerMethod)
    rates(recipe)
    LayerRunners(recipe.train, config)
    indexers.check(recipe.train, config)
    check_whole(recipe, ranks=1)


def check_whole(recipe: Recipe, ranks: int) -> None:
    """What needs whole weights and their state in this process."""
    offload = recipe.train.offload
    check_ranks(offload, ranks)
    offloaded = offload is not None and offload.optimizer is not None
    if recipe.train.memory is not None and ranks > 1:
        raise UserError("train.memory", "is for one process yet", "Leave it out, or train in one process.")
    if recipe.train.memory is not None and recipe.train.memory.choose is not None and offloaded:
        problem = "tries settings on a copy of the optimizer's state, which is offloaded"
        raise UserError("train.memory.choose", problem, "Leave it out, or train.offload.optimizer.")
    if recipe.train.dtype == "fp8" and ranks > 1:
        raise UserError("train.dtype", "fp8 is for one process yet", float8.INSTEAD)
    if recipe.train.dtype == "fp8" and recipe.train.constraint is not None:
        raise UserError("train.constraint", "has matmuls of its own, and train.dtype is fp8", "Leave out one of them.")
    if recipe.train.constraint is not None and (ranks > 1 or offloaded):
        problem = "holds whole weights, and these are divided among ranks or offloaded"
        raise UserError("train.constraint", problem, "Run it in one process, without train.offload.optimizer.")


def model_config(recipe: Recipe) -> ModelConfig:
    if recipe.train.init is None:
        marks = Infilling(0, (0,)) if recipe.model.infilling else None  # a tokenizer will say their numbers
        config = architecture(recipe.model, bos=None, eos=(), pad=None, infilling=marks)
        check_fresh_indexer(recipe, config)
        return config
    source = open_checkpoint(recipe.train.init)
    check_plain(source, recipe.train.init)
    config = match(source)[0]
    refuse_encoder(config, recipe.train.init, "it does not learn to predict tokens")
    return config


def check_fresh_indexer(recipe: Recipe, config: ModelConfig) -> None:
    """The choice of tokens has no gradient: a fresh indexer that is not taught would choose at random for ever."""
    indexer = config.attention.indexer if isinstance(config.attention, Latent) else None
    if indexer is not None and indexer.topk < config.context and recipe.train.indexer is None:
        problem = f"{indexer.topk} tokens of a context of {config.context}: nothing trains a fresh indexer to choose"
        raise UserError("model.indexer.topk", problem, "Write train.indexer, or raise it to model.context.")


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
    if isinstance(data, TokenStream) and data.data.rows is not None:
        check_rows(recipe, f"{data.data.directory} (rows in place of tokens)")
    if not isinstance(data, TokenStream) or (steps := data.batches(recipe.train.steps)) == recipe.train.steps:
        return recipe, False
    if not steps:
        problem = f"the sources give {data.plan.tokens:,} tokens within their max_epochs, not a batch"
        raise UserError("data.sources", problem, "Raise max_epochs, or lower train.batch_tokens.")
    return recipe.changed(train={"steps": steps}), True


def check_rows(recipe: Recipe, where: str) -> None:
    """Data in which rows stand in place of tokens: whether everything passes them on."""
    if not recipe.build("train.objective", Objective).takes_rows:
        problem = f"{recipe.train.objective.name} reads tokens alone"
        raise UserError(where, problem, "Take the objective next_token, or data without rows.")
    if recipe.train.memory is not None:
        raise UserError(where, "train.memory remembers tokens alone", "Leave it out.")
    if launched():
        raise UserError(where, "are for one process yet", "Run it without torchrun.")
