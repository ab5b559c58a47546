"""The text a model reads while it is compressed, as sequences of tokens: a file of the user's, or what Python brings.

The builtin text is the reference that Python's own `help()` shows: half a megabyte of English about many things, on
every machine.
"""

from __future__ import annotations

from pathlib import Path

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

LEAST_TOKENS = 128  # fewer say nothing about any matrix


def builtin_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(data: Path | None) -> str:
    if data is None:
        return builtin_text()
    try:
        return data.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(data, "no such file", "Name a file of text.") from None
    except UnicodeDecodeError:
        raise UserError(data, "is not UTF-8 text", "Name a file of text.") from None
    except OSError as error:
        raise UserError(data, f"cannot be read ({error.strerror})", "Name a file of text.") from None


def sequences(text: str, tokenizer: Tokenizer, count: int, length: int, place: object) -> list[list[int]]:
    """Up to `count` pieces of `length` tokens from all over the text."""
    if count * length < LEAST_TOKENS:
        problem = f"{count} pieces of {length} tokens are {count * length}, and {LEAST_TOKENS} is the least"
        raise UserError("--samples", problem, "Raise it, or --length.")
    # A token is rarely longer than this many characters, and a whole corpus need not be read for a few of them.
    tokens = tokenizer.encode(text[: max(4096, count * length * 16)])
    pieces = [tokens[at : at + length] for at in range(0, len(tokens), length)]
    if len(pieces) > 1 and len(pieces[-1]) < length:
        pieces.pop()
    if len(pieces) > count:
        pieces = [pieces[number * len(pieces) // count] for number in range(count)]
    if sum(map(len, pieces)) < LEAST_TOKENS:
        problem = f"is too small to calibrate with: {len(tokens)} tokens, and {LEAST_TOKENS} is the least"
        raise UserError(place, problem, "Give more text with --data, or leave it out for the builtin one.")
    return pieces
