"""The fields of `schema/samplers.py` as the engine's sampling params."""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.schema.samplers import LogitBias, SamplerParams
from moesaic.serve.core.sampling import SAMPLERS
from moesaic.strict import found

SAME = (  # in both
    *("min_p", "typical_p", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "repeat_last_n"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
)
# llama.cpp's letters of samplers, and other names.
LETTERS = {
    **{"e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p"},
    **{"m": "min_p", "x": "xtc", "t": "temperature"},
}
ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical": "typ_p", "typical_p": "typ_p"}
SPELLED = {name.replace("_", ""): name for name in SAMPLERS}


def sampler_params(body: SamplerParams) -> dict[str, Any]:
    """What a body sets."""
    values = {name: given for name in SAME if (given := getattr(body, name)) is not None}
    if (penalty := body.repetition_penalty or body.repeat_penalty) is not None:
        values["repetition_penalty"] = penalty
    if body.top_n_sigma is not None:
        values["top_n_sigma"] = max(0.0, body.top_n_sigma)
    if body.dry_sequence_breakers is not None:
        values["dry_sequence_breakers"] = tuple(dict.fromkeys(body.dry_sequence_breakers))
    if body.bad_words:
        values["bad_words"] = tuple(dict.fromkeys(body.bad_words))
    if body.allowed_token_ids is not None:
        values["allowed_tokens"] = frozenset(body.allowed_token_ids)
    if body.samplers is not None:
        values["samplers"] = sampler_order(body.samplers)
    return values


def sampler_order(given: str | list[str]) -> tuple[str, ...]:
    """Samplers by their names, in any of llama.cpp's spellings, or by its letters."""
    if isinstance(given, str):
        unknown = next((letter for letter in given if letter not in LETTERS), None)
        order = [LETTERS.get(letter, "") for letter in given]
    else:
        plain = [ALIASES.get(name, name).replace("-", "").replace("_", "") for name in given]
        unknown = next((name for name, spelled in zip(given, plain, strict=True) if spelled not in SPELLED), None)
        order = [SPELLED.get(name, "") for name in plain]
    if unknown is not None:
        letters = ", ".join(f"{name} ({letter})" for letter, name in LETTERS.items())
        raise UserError("samplers", f"there is no {found(unknown)}", f"Known: {letters}.")
    return tuple(dict.fromkeys(order))


def logit_bias(given: LogitBias, tokenizer: Tokenizer | None) -> dict[int, float]:
    """By token: ids, or texts all of whose tokens get the bias; false is never."""
    biases: dict[int, float] = {}
    for key, value in given.items() if isinstance(given, dict) else given:
        if isinstance(value, str) or not (value is False or -100 <= value <= 100):
            raise UserError("logit_bias", f"a bias must be false or between -100 and 100, not {found(value)}")
        bias = float("-inf") if value is False else float(value)
        if isinstance(given, dict) and isinstance(key, str) and key.isascii() and key.isdigit():
            key = float(key)
        if isinstance(key, str):
            if tokenizer is None:
                raise UserError("logit_bias", f"the model has no tokenizer to read {found(key)}", "Give token ids.")
            biases |= dict.fromkeys(tokenizer.encode(key, special=False), bias)
        elif key is not False and key == int(key):
            biases[int(key)] = bias
        else:
            raise UserError("logit_bias", f"must name tokens by their ids or texts, not {found(key)}")
    return biases
