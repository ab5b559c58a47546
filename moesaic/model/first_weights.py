"""First weights of a model that is trained from scratch: normal matrices, norms of one, biases of zero.

Every matrix has a generator of its own, seeded by the run's seed and its name, and every expert's too: so whoever holds
only some layers or experts makes exactly those, and they are the same under any division among devices.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def first_weight(
    name: str, shape: tuple[int, ...], seed: int, std: float, rows: tuple[int, int] | None = None
) -> Tensor:
    """Float32. Of a stack of matrices (one per expert) `rows` are those wanted; of anything else, rows of the whole."""
    start, stop = rows if rows is not None else (0, shape[0])
    if len(shape) == 1:
        return torch.full((stop - start,), 0.0 if name.endswith(("bias", "correction")) else 1.0)
    if len(shape) == 2:
        return _normal(name, shape, seed, std)[start:stop]
    made = [_normal(f"{name}/{number}", shape[1:], seed, std) for number in range(start, stop)]
    return torch.stack(made) if made else torch.empty(0, *shape[1:])


def _normal(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).normal_(0, std, generator=generator)
