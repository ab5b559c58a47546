"""Sampling params as people write them on a command line: `min_p=0.05`, `dry_multiplier=0.8`, `bad_words=foo,bar`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.core.sampling import Sampling
from moesaic.strict import did_you_mean

# Not of one text, or not the user's.
OTHERS = ("logit_bias", "stop_tokens", "logprobs", "processed_logprobs", "prompt_logprobs", "grammar")
NO_DEFAULT = {"max_tokens": int, "seed": int, "repeat_last_n": int}  # whole numbers that are None by default
KINDS: dict[str, type] = {
    entry.name: NO_DEFAULT.get(entry.name, tuple if entry.default in (None, ()) else type(entry.default))
    for entry in dataclasses.fields(Sampling)
    if entry.name not in (*OTHERS, "allowed_tokens", "record_routes", "record_draws")
}


def parse_sampling(given: Iterable[str], place: str = "--sampling", without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Params by name, of texts NAME=VALUE, but for those that make no sense there."""
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise UserError(place, f"{text!r} is no NAME=VALUE", "Give one such as min_p=0.05.")
        if name in without:
            raise UserError(place, f"{name} is each request's own", "Leave it out.")
        values[name] = sampling_value(name, value, place)
    Sampling(**values)
    return values


def sampling_value(name: str, text: str, place: str) -> Any:
    kind = KINDS.get(name)
    if kind is None:
        raise UserError(
            place, f"there is no {name!r}{did_you_mean(name, KINDS)}", f"Known: {', '.join(sorted(KINDS))}."
        )
    try:
        if kind is bool:
            return {"true": True, "false": False}[text]
        if kind is tuple:
            return tuple(part.replace("\\n", "\n") for part in text.split(",")) if text else ()
        number = kind(text)
    except (ValueError, KeyError):
        number = math.nan
    if number != number:
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UserError(place, f"{name} must be {words[kind]}, not {text!r}", "Correct it.")
    return number
