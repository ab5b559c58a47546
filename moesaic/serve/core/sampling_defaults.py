"""Default sampling params of a model: its generation_config.json."""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.json_files import object_or_empty
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.request import Sampling

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def recommended(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What it sets of `FIELDS`; nothing where a value is invalid. `do_sample: false` is temperature 0."""
    raw = tokenizer.files.get("generation_config.json") if tokenizer else None
    content = object_or_empty(raw)
    values: dict[str, Any] = {name: content[name] for name in FIELDS if type(content.get(name)) in (int, float)}
    if content.get("do_sample") is False:
        values["temperature"] = 0.0
    try:
        Sampling(**values)
    except UserError:
        return {}
    return values
