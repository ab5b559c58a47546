"""The calibration text as sequences of tokens."""

from __future__ import annotations

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

MIN_TOKENS = 128  # fewer give no usable statistics


def sequences(text: str, tokenizer: Tokenizer, count: int, length: int, place: object) -> list[list[int]]:
    """Up to `count` pieces of `length` tokens from all over the text."""
    if count * length < MIN_TOKENS:
        problem = f"{count} pieces of {length} tokens are {count * length}, and {MIN_TOKENS} is the least"
        raise UserError("--samples", problem, "Raise it, or --length.")
    # A token is rarely longer than this many characters, and a whole corpus need not be read for a few of them.
    tokens = tokenizer.encode(text[: max(4096, count * length * 16)])
    pieces = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    if len(pieces) > 1 and len(pieces[-1]) < length:
        pieces.pop()
    if len(pieces) > count:
        pieces = [pieces[number * len(pieces) // count] for number in range(count)]
    if sum(map(len, pieces)) < MIN_TOKENS:
        problem = f"is too small to calibrate with: {len(tokens)} tokens, and {MIN_TOKENS} is the least"
        raise UserError(place, problem, "Give more text with --data, or leave it out for the builtin one.")
    return pieces
