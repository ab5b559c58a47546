"""From the hidden states of a prompt to its embedding: the `mean` of them, that of the `last` token or of the first
(`cls`), or all of them (`none`). A model says which one it was trained for in 1_Pooling/config.json, as
sentence-transformers writes it."""

from __future__ import annotations

import json
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import UserError
from moesaic.json_files import object_or_empty
from moesaic.model.tokenizer import Tokenizer

Pooling = Literal["mean", "last", "cls", "none"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
CONFIG = "1_Pooling/config.json"
# Keys of that file; `pooling_mode`, a name, in newer ones.
MODES: dict[str, Pooling] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
}
NAMES: dict[str, Pooling] = {"lasttoken": "last", "last": "last", "cls": "cls", "mean": "mean"}


def recommended_pooling(tokenizer: Tokenizer | None) -> Pooling:
    """The model's own; `mean` where it says nothing."""
    if tokenizer is None:
        return "mean"
    content = object_or_empty(tokenizer.files.get(CONFIG))
    named = content.get("pooling_mode")
    if isinstance(named, str) and named in NAMES:
        return NAMES[named]
    return next((pooling for key, pooling in MODES.items() if content.get(key) is True), "mean")


def dense_layers(tokenizer: Tokenizer | None) -> list[str]:
    """Modules that sentence-transformers puts after pooling and we do not have, by their kind."""
    try:
        modules = json.loads((tokenizer.files.get("modules.json") if tokenizer else None) or b"[]")
        kinds = [str(module["type"]).rsplit(".", 1)[-1] for module in modules]
    except (ValueError, TypeError, KeyError, RecursionError):
        return []
    return [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]


def check_modules(tokenizer: Tokenizer, place: object) -> None:
    """Refuse what would give other vectors than sentence-transformers does."""
    if layers := dense_layers(tokenizer):
        problem = f"puts {', '.join(layers)} after pooling, which is not supported"
        raise UserError(place, problem, "Take a model whose modules.json has Transformer, Pooling and Normalize only.")
    content = object_or_empty(tokenizer.files.get(CONFIG))
    modes = [key for key, value in content.items() if key.startswith("pooling_mode_") and value is True]
    named = content.get("pooling_mode")
    modes += [named] if isinstance(named, str) and named not in NAMES else []
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or len(modes) > 1:
        problem = f"{CONFIG}: pools by {' and '.join(modes)}"
        raise UserError(place, problem, "Take a model that pools by mean, by its first token (cls) or by its last.")


def add_rows(pooling: Pooling, before: Tensor | None, rows_TD: Tensor) -> Tensor:
    """What is kept of a prompt's hidden states so far, after some more of them."""
    rows_TD = rows_TD.float()
    match pooling:
        case "mean":
            total_D = rows_TD.sum(0)
            return total_D if before is None else before + total_D
        case "last":
            return rows_TD[-1].clone()
        case "cls":
            return rows_TD[0].clone() if before is None else before
        case "none":
            return rows_TD.clone() if before is None else torch.cat([before, rows_TD])


def pooled(pooling: Pooling, kept: Tensor, tokens: int) -> Tensor:
    """The embedding of so many tokens, not normalized; of `none`, (tokens, D)."""
    return kept / tokens if pooling == "mean" else kept


def normalized(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1)
