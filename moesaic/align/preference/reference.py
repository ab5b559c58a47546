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
from moesaic.parallel.world import World
from moesaic.sharded import local
from moesaic.train.objectives import layout_of

TOKENS = 8192  # of a forward
SECONDS = 20.0  # between two writes


def reference_logprobs(
    model: Model, pairs: Sequence[Pair], wanted: Iterable[int], folder: Path, world: World | None = None
) -> Tensor:
    """Log-probabilities of the chosen and the rejected answer (pairs, 2), by the pairs' numbers; those that are not
    wanted may be nan. Weights and pairs are those that the stage begins with. Every rank computes a share of them."""
    world = world or World(model.device)
    rows = max(pair.number for pair in pairs) + 1
    file = folder / f"reference-{_key(model, pairs, world)}.safetensors"
    known_P2 = world.from_main(_read(file, rows))
    numbers = set(wanted)
    missing = [pair for pair in pairs if pair.number in numbers and known_P2[pair.number].isnan().any()]
    written = time.monotonic()
    chunks = list(_in_chunks(missing))
    for first in range(0, len(chunks), world.data_ranks):
        turn = chunks[first : first + world.data_ranks]
        known_P2[[pair.number for some in turn for pair in some]] = _in_turn(model, turn, world)
        if world.is_main and time.monotonic() - written > SECONDS:
            _write(file, known_P2)
            written = time.monotonic()
    if missing and world.is_main:
        _write(file, known_P2)
    return known_P2


def _in_turn(model: Model, turn: Sequence[Sequence[Pair]], world: World) -> Tensor:
    """Of a chunk for each rank. One that has none computes the last once more: ranks compute layers together."""
    mine = min(world.data_rank, len(turn) - 1)
    found_S = answer_logprobs(model, [side for pair in turn[mine] for side in pair.sides]).cpu()
    parts = [torch.zeros(2 * len(some), dtype=found_S.dtype) for some in turn]
    if world.data_rank == mine:
        parts[mine] = found_S
    return world.total(torch.cat(parts)).reshape(-1, 2)


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
    """Of its shape and all its weights, of which a rank has a share."""
    digest = hashlib.blake2b(repr(model.config).encode(), digest_size=12)
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(local(tensor).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _key(model: Model, pairs: Sequence[Pair], world: World) -> str:
    digest = hashlib.blake2b("".join(world.collect(fingerprint(model))).encode(), digest_size=12)
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
