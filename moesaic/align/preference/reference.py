"""Reference log-probabilities: of both completions of every pair, before the stage; computed once, kept in the run.

The file is named after the model's weights and the pairs' tokens, so it is never taken for another's; it is replaced
whole, and a run that was stopped while computing resumes from what is there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from moesaic import atomic
from moesaic.align.conversation import Said
from moesaic.align.preference.pairs import Pair
from moesaic.align.sft import pack_said
from moesaic.model.transformer import Model
from moesaic.train.objectives import layout_of

TOKENS = 8192  # of a forward
SECONDS = 20.0  # between two writes


def reference_logprobs(model: Model, pairs: Sequence[Pair], wanted: Iterable[int], folder: Path) -> Tensor:
    """Log-probabilities of the chosen and the rejected answer (pairs, 2), by the pairs' numbers; those that are not
    wanted may be nan. Weights and pairs are those that the stage begins with."""
    rows = max(pair.number for pair in pairs) + 1
    file = folder / f"reference-{_key(model, pairs)}.safetensors"
    known_P2 = _read(file, rows)
    numbers = set(wanted)
    missing = [pair for pair in pairs if pair.number in numbers and known_P2[pair.number].isnan().any()]
    written = time.monotonic()
    for some in _in_chunks(missing):
        found_S = answer_logprobs(model, [side for pair in some for side in pair.sides])
        known_P2[[pair.number for pair in some]] = found_S.cpu().reshape(-1, 2)
        if time.monotonic() - written > SECONDS:
            _write(file, known_P2)
            written = time.monotonic()
    if missing:
        _write(file, known_P2)
    return known_P2


@torch.no_grad()
def answer_logprobs(model: Model, said: Sequence[Said]) -> Tensor:
    """The log-probability of what is learned of each, one sum per sequence."""
    batch = pack_said(said, {}).to(model.device)
    hidden_TD = model(batch.tokens_T, layout_of(batch))
    logprobs_T, _ = model.token_logprobs(hidden_TD, batch.targets_T)
    return torch.stack([part.sum() for part in logprobs_T.split(batch.lengths)])


def _in_chunks(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    some: list[Pair] = []
    tokens = 0
    for pair in pairs:
        size = sum(len(side.tokens) for side in pair.sides)
        if some and tokens + size > TOKENS:
            yield some
            some, tokens = [], 0
        some.append(pair)
        tokens += size
    if some:
        yield some


def fingerprint(model: Model) -> str:
    """Of its shape and all its weights."""
    digest = hashlib.blake2b(repr(model.config).encode(), digest_size=12)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _key(model: Model, pairs: Sequence[Pair]) -> str:
    digest = hashlib.blake2b(fingerprint(model).encode(), digest_size=12)
    for pair in pairs:
        digest.update(repr((pair.number, [(side.tokens, side.learn) for side in pair.sides])).encode())
    return digest.hexdigest()


def _read(file: Path, rows: int) -> Tensor:
    try:
        found = load_file(file)["logprobs"]
    except (OSError, SafetensorError, KeyError):  # none yet, or nothing that can be used
        found = torch.empty(0)
    return found if found.shape == (rows, 2) else torch.full((rows, 2), float("nan"))


def _write(file: Path, known_P2: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_bytes(file, save({"logprobs": known_P2.contiguous()}))
