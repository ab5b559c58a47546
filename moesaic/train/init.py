"""Where a run's weights come from: a model directory to go on from, or fresh ones of the recipe's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.kernels.quantized import QuantizedWeight
from moesaic.model import directory, lineage
from moesaic.model.formats.checkpoint import SIDE_FILES
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.recipe import Recipe
from moesaic.train.architecture import architecture

# The model, the files that go with it, and its life before the run.
Begun = tuple[Model, dict[str, bytes], list[dict[str, Any]]]


def dtype(recipe: Recipe, device: torch.device, before: str = "auto") -> torch.dtype:
    """What the weights are kept in while they learn: as told, or as `before`, where a run goes on, or what is fast."""
    told = before if recipe.train.dtype == "auto" else recipe.train.dtype
    found: torch.dtype = getattr(torch, told) if told != "auto" else hardware.dtype(device, torch.bfloat16)
    return found


def why(recipe: Recipe, before: str) -> str:
    """Why the weights have this dtype, as the first lines of a run say it."""
    if recipe.train.dtype != "auto":
        return "set by train.dtype"
    return "fast on this machine (train.dtype: auto)" if before == "auto" else "as when this run was started"


def check_learnable(begun: Model, place: object) -> None:
    if any(isinstance(module, QuantizedWeight) for module in begun.modules()):
        raise UserError(place, "is compressed, and codes do not learn", "Name the model it was made from.")


def check_tokens(init: str, own: Tokenizer, tokenizer: Tokenizer, place: object) -> None:
    if not own.same_tokens(tokenizer):
        problem = f"has another vocabulary than the model {init}, whose tokens mean something else"
        raise UserError(place, problem, f"Prepare the data elsewhere, with data.tokenizer={init}.")


def check_room(vocab: int, tokenizer: Tokenizer) -> None:
    if len(tokenizer) > vocab:
        raise UserError("model.vocab", f"{vocab}, but the tokenizer has {len(tokenizer)} tokens", "Raise it.")


def model(recipe: Recipe, data: Path, device: torch.device, before: str = "auto") -> Begun:
    """The model, the files that go with it, and its life before this run. `before` is the dtype of a run that goes on:
    what is fast may be another here, or now."""
    settings = recipe.train
    kind = dtype(recipe, device, before)
    folder = data / "tokenizer"
    files = {name: (folder / name).read_bytes() for name in SIDE_FILES if (folder / name).is_file()}
    tokenizer = Tokenizer.from_files(files, folder)
    if tokenizer is None:
        raise UserError(folder / "tokenizer.json", "no such file", "Prepare the data again.")
    if settings.init:
        begun = directory.load(settings.init, dtype=kind, device=device)
        check_learnable(begun, settings.init)
        if len(tokenizer) > begun.config.vocab:
            problem = f"has {begun.config.vocab} tokens, and the data was prepared with {len(tokenizer)}"
            raise UserError(settings.init, problem, f"Prepare the data with data.tokenizer={settings.init}.")
        if begun.tokenizer is not None:
            check_tokens(settings.init, begun.tokenizer, tokenizer, data)
            files = dict(begun.tokenizer.files)  # its own, with the template it is spoken to by
        return begun, files, lineage.read(Path(settings.init))
    eos = tuple(sorted(tokenizer.stop_tokens))
    config = architecture(recipe.model, bos=None, eos=eos, pad=eos[0] if eos else None)
    check_room(config.vocab, tokenizer)
    fresh = Model(config).initialize(settings.seed).to(device, kind)
    fresh.tokenizer = tokenizer
    return fresh, files, []
