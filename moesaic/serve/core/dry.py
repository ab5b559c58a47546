"""DRY (Don't Repeat Yourself; p-e-w, 2024), as llama.cpp defines it: a token that would continue a repetition is made
less likely, exponentially in how long that is by now.

Where the last `n` tokens of a text stand somewhere before too, the token that followed there is penalized by
`multiplier * base ** (n - allowed_length)`, if n is at least `allowed_length`. No repetition reaches back beyond a
sequence breaker, such as a new line: lists and dialogues repeat how their lines begin.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moesaic.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moesaic.serve.core.sampling import Sampling

MAX_CHARS, MAX_TAIL = 40, 20  # of a breaker: its characters, and its tokens after the first
MAX_LOG = 88.72  # of the largest float32: a larger penalty is no different,
MAX_PENALTY = 1e30  # and an infinite one could leave no token at all
# Of a repetition; a longer one counts as one of this length. Far beyond what any penalty lets stand, it bounds the time
# for a prompt that is one token over and over.
MAX_REPEAT = 512

Breakers = Mapping[int, tuple[tuple[int, ...], ...]]  # first token -> the rest of each breaker that begins with it


@lru_cache(maxsize=64)
def breakers_of(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> Breakers:
    """In which tokens the breakers can stand in a text: one that holds a breaker, or one that ends in how it begins,
    followed by the tokens of the rest."""
    texts, by_last = token_texts(tokenizer)
    found: dict[int, set[tuple[int, ...]]] = {}
    for breaker in dict.fromkeys(breaker[:MAX_CHARS] for breaker in breakers):
        for token, text in enumerate(texts):
            if breaker in text:
                found.setdefault(token, set()).add(())
        for count in range(1, len(breaker)):
            start = breaker[:count]
            ending = [token for token in by_last.get(start[-2:], ()) if texts[token].endswith(start)]
            rest = tuple(tokenizer.encode(breaker[count:], special=False)[:MAX_TAIL]) if ending else ()
            for token in ending:
                if breaker not in texts[token]:
                    found.setdefault(token, set()).add(rest)
    return {token: tuple(sorted(rests)) for token, rests in found.items()}


@lru_cache(maxsize=4)
def token_texts(tokenizer: Tokenizer) -> tuple[list[str], dict[str, list[int]]]:
    """What every token stands for by itself, and the tokens by their last one and their last two characters."""
    tokens = [[token] for token in range(len(tokenizer))]
    texts = list(tokenizer.fast.decode_batch(tokens, skip_special_tokens=False))
    by_last: dict[str, list[int]] = {}
    for token, text in enumerate(texts):
        for end in {text[-1:], text[-2:]}:
            by_last.setdefault(end, []).append(token)
    return texts, by_last


def dry_penalties(tokens: Sequence[int], sampling: Sampling, breakers: Breakers) -> dict[int, float]:
    """What is to be taken off the logits of which tokens, after these."""
    last_n, allowed, base = sampling.dry_penalty_last_n, sampling.dry_allowed_length, sampling.dry_base
    window = tokens[-last_n:] if last_n > 0 else tokens if last_n < 0 else ()
    if len(window) <= allowed or (limit := _since_breaker(window, breakers)) < allowed:
        return {}
    # Beyond this length of a repetition its penalty does not grow.
    most = allowed + (int(MAX_LOG / math.log(base)) if base > 1.000001 else 0)
    lengths = repeats(np.asarray(window, dtype=np.int64), min(limit, most, allowed + MAX_REPEAT), allowed)
    return {
        token: min(sampling.dry_multiplier * base ** (length - allowed), MAX_PENALTY)
        for token, length in lengths.items()
        if () not in breakers.get(token, ())
    }


def subtract_dry(logits_V: Tensor, tokens: Sequence[int], sampling: Sampling, breakers: Breakers) -> None:
    if penalties := dry_penalties(tokens, sampling, breakers):
        places = torch.tensor(list(penalties), device=logits_V.device)
        logits_V[places] -= torch.tensor(list(penalties.values()), dtype=logits_V.dtype, device=logits_V.device)


def repeats(window_T: np.ndarray, limit: int, least: int) -> dict[int, int]:
    """Each token that follows an earlier copy of how the window ends, and the length of its longest such copy, counted
    up to `limit`; only copies of at least `least` tokens."""
    # Where copies end: they grow to the left one token at a time, and most are over soon.
    ends = np.flatnonzero(window_T[:-1] == window_T[-1])
    found: dict[int, int] = {}
    length = 1
    while len(ends):
        if length >= least:
            found.update(dict.fromkeys(window_T[ends + 1].tolist(), length))
        if length >= limit:
            break
        ends = ends[ends >= length]
        ends = ends[window_T[ends - length] == window_T[-1 - length]]
        length += 1
    return found


def _since_breaker(window: Sequence[int], breakers: Breakers) -> int:
    """How many tokens come after the last breaker in a window."""
    if not breakers:
        return len(window)
    for back in range(len(window)):
        rests = breakers.get(window[-1 - back])
        if rests is None:
            continue
        after = tuple(window[len(window) - back :][:MAX_TAIL])
        whole = [len(rest) for rest in rests if len(rest) <= back and after[: len(rest)] == rest]
        if whole:
            return back - max(whole)
    return len(window)
