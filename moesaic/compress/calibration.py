"""Calibration text as sequences of tokens: several kinds of text, so that what is fitted to them fits others too.

Rounding that is fitted to one kind of text alone loses on all others. So beside the user's own text (half of the tokens
if there is one) stand the builtin reference and what the model itself writes, which has every kind it was trained on in
it. They alternate, and the last quarter, on which GPTQ tries its dampings, is of all kinds. Python's own source code is
never calibrated on: perplexity on it is what compression costs on unlike text.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine

MIN_TOKENS = 128  # fewer give no usable statistics
OTHER_MODULES = ("argparse", "ast", "csv", "datetime", "difflib", "heapq", "json", "random", "statistics", "textwrap")
PROMPT_TOKENS = 4  # of the text, that the model continues


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


def mixed(kinds: Sequence[list[list[int]]], count: int) -> list[list[int]]:
    """`count` sequences of all kinds in turns: any prefix, and any quarter, has its share of each."""
    turns = chain.from_iterable(zip_longest(*kinds))
    return [piece for piece in turns if piece is not None][:count]


def written_by(model: Model, starts: Sequence[list[int]], length: int) -> list[list[int]]:
    """What the model writes after a few tokens of each text, at temperature one: text as it has learned it."""
    prompts = [tokens[:PROMPT_TOKENS] for tokens in starts]
    fresh = max(1, length - PROMPT_TOKENS)
    engine = Engine(model)
    found = engine.generate(prompts, max_tokens=fresh, temperature=1.0, seed=0, ignore_eos=True)
    return [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, found, strict=True)]


def unlike_text() -> str:
    """Python's own source code, which is on every machine."""
    texts = []
    for name in OTHER_MODULES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin and Path(spec.origin).suffix == ".py":
            texts.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n\n".join(texts)
