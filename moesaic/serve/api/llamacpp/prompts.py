"""llama.cpp's forms of a prompt, as tokens: a text, tokens, both in a row, an object, or a list of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.llamacpp.schema import PromptObject
from moesaic.serve.api.service import Service

MAX_PROMPTS = 2048


def prompts_of(given: Any) -> list[Any]:
    """The single prompts."""
    if not isinstance(given, list):
        return [given]
    kinds = {type(part) for part in given}
    if int in kinds and kinds <= {int, str}:
        return [given]
    if int in kinds:
        raise UserError("prompt", "tokens cannot stand beside whole prompts", "Put them into a list of their own.")
    if len(given) > MAX_PROMPTS:
        raise UserError("prompt", f"holds {len(given)} prompts, and {MAX_PROMPTS} are the most")
    return given


def tokens_of(service: Service, given: Any, place: str, *, special: bool = True) -> list[int]:
    """What the tokenizer puts around every text is added to one that stands first."""
    if isinstance(given, PromptObject):
        if given.multimodal_data:
            raise UserError(f"{place}.multimodal_data", "this model reads text only", "Leave it out.")
        given = given.prompt_string
    try:
        if isinstance(given, str):
            return service.tokenize(given, special=special)
        return _joined(service, given, special)
    except UserError as error:
        error.place = place if error.place in ("prompt", "text") else error.place
        raise


def _joined(service: Service, parts: Sequence[str | int], special: bool) -> list[int]:
    found: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            found.append(part)
        else:
            found += service.tokenize(part, special=special and number == 0)
    return found
