"""Initial weights of a run: those of a model directory, or random ones of the recipe's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.kernels.quantized import QuantizedWeight
from moesaic.model import lineage
from moesaic.model.config import Infilling
from moesaic.model.encoder import refuse_encoder
from moesaic.model.formats.checkpoint import SIDE_FILES, Source
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import is_compressed, open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import Recipe
from moesaic.train import float8
from moesaic.train.architecture import architecture
from moesaic.train.objectives.blank_infilling import END, MASKS, START

# The model, the files that go with it, and its life before the run.
InitialModel = tuple[Model, dict[str, bytes], list[dict[str, Any]]]


def dtype(recipe: Recipe, device: torch.device, before: str = "auto") -> torch.dtype:
    """The dtype to train in: that of the recipe, that of the run that is resumed (`before`), or what is fast here."""
    if recipe.train.dtype == "fp8":
        return torch.bfloat16  # of the weights that matmuls round
    name = before if recipe.train.dtype == "auto" else recipe.train.dtype
    chosen: torch.dtype = getattr(torch, name) if name != "auto" else hardware.dtype(device, torch.bfloat16)
    return chosen


def why(recipe: Recipe, before: str) -> str:
    """Why the weights have this dtype, as the first lines of a run say it."""
    if recipe.train.dtype == "fp8":
        return "matmuls of layers in fp8 (train.dtype)"
    if recipe.train.dtype != "auto":
        return "set by train.dtype"
    return "fast on this machine (train.dtype: auto)" if before == "auto" else "as when this run was started"


def check_trainable(model: Model, place: object) -> None:
    if any(isinstance(module, QuantizedWeight) for module in model.modules()):
        raise _quantized(place)


def check_plain(source: Source, place: object) -> None:
    """The same, before anything is read."""
    if is_compressed(source):
        raise _quantized(place)


def _quantized(place: object) -> UserError:
    return UserError(place, "is quantized, and cannot be trained", "Name the model it was made from.")


def check_tokens(init: str, own: Tokenizer, tokenizer: Tokenizer, place: object) -> None:
    if not own.same_tokens(tokenizer):
        problem = f"has another vocabulary than the model {init}, whose tokens mean something else"
        raise UserError(place, problem, f"Prepare the data elsewhere, with data.tokenizer={init}.")


def check_vocab(vocab: int, tokenizer: Tokenizer) -> None:
    if len(tokenizer) > vocab:
        raise UserError("model.vocab", f"{vocab}, but the tokenizer has {len(tokenizer)} tokens", "Raise it.")


def model(recipe: Recipe, data: Path, world: World, before: str = "auto") -> InitialModel:
    """The model, the files that go with it, and its life before this run. `before` is the dtype of a run that is
    resumed: another may be fast here."""
    settings = recipe.train
    kind = dtype(recipe, world.device, before)
    folder = data / "tokenizer"
    files = {name: (folder / name).read_bytes() for name in SIDE_FILES if (folder / name).is_file()}
    tokenizer = Tokenizer.from_files(files, folder)
    if tokenizer is None:
        raise UserError(folder / "tokenizer.json", "no such file", "Prepare the data again.")
    if settings.init:
        source = open_checkpoint(settings.init)
        config, _ = match(source)
        refuse_encoder(config, settings.init, "it does not learn to predict tokens")
        if len(tokenizer) > config.vocab:
            problem = f"has {config.vocab} tokens, and the data was prepared with {len(tokenizer)}"
            raise UserError(settings.init, problem, f"Prepare the data with data.tokenizer={settings.init}.")
        initial = world.build(config, kind, source)
        check_trainable(initial, settings.init)
        multiply(initial, recipe)
        own = Tokenizer.from_files(source.files, source.place)
        if own is not None:
            check_tokens(settings.init, own, tokenizer, data)
            files = dict(own.files)  # its own, with its chat template
        initial.tokenizer = own
        return initial, files, lineage.read(Path(settings.init))
    eos = tuple(sorted(tokenizer.stop_tokens))
    infilling, ends = blanks(recipe, tokenizer)
    config = architecture(recipe.model, bos=None, eos=(*eos, *ends), pad=eos[0] if eos else None, infilling=infilling)
    check_vocab(config.vocab, tokenizer)
    fresh = world.build(config, kind, settings.seed)
    fresh.tokenizer = tokenizer
    multiply(fresh, recipe)
    return fresh, files, []


def multiply(model: Model, recipe: Recipe) -> None:
    """By other kernels than the model's, where the recipe says so."""
    if recipe.train.dtype == "fp8":
        float8.multiply_in_float8(model)


def blanks(recipe: Recipe, tokenizer: Tokenizer) -> tuple[Infilling | None, tuple[int, ...]]:
    """The tokens of a model that fills blanks, and the one that ends what is filled in."""
    if not recipe.model.infilling:
        return None, ()
    found = [tokenizer.fast.token_to_id(text) for text in (*MASKS, START, END)]
    numbers = [number for number in found if number is not None]
    if len(numbers) < len(found):
        problem = f"the tokenizer lacks one of {', '.join((*MASKS, START, END))}"
        raise UserError("model.infilling", problem, "Let one be trained: leave data.tokenizer out.")
    *masks, start, end = numbers
    return Infilling(start, tuple(masks)), (end,)
