"""First weights of a model that is trained from scratch: normal matrices, norms of one, biases of zero.

Every matrix has a generator of its own, seeded by the run's seed and its name, and every expert's too: so whoever holds
only some layers or experts makes exactly those, and they are the same under any division among devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.model.config import GroupedQuery, ModelConfig

ZEROS = ("bias", "correction", "sinks", "bias_EG", "bias_ED")


def first_weight(
    name: str, shape: tuple[int, ...], seed: int, std: float, rows: tuple[int, int] | None = None
) -> Tensor:
    """Float32. Of a stack of matrices (one per expert) `rows` are those wanted; of anything else, rows of the whole."""
    start, stop = rows if rows is not None else (0, shape[0])
    if name.endswith(ZEROS):
        return torch.zeros(stop - start, *shape[1:])
    if len(shape) == 1:
        return torch.ones(stop - start)
    if len(shape) == 2:
        return _normal(name, shape, seed, std)[start:stop]
    made = [_normal(f"{name}/{number}", shape[1:], seed, std) for number in range(start, stop)]
    return torch.stack(made) if made else torch.empty(0, *shape[1:])


def first_parameter(
    name: str, shape: tuple[int, ...], seed: int, config: ModelConfig, rows: tuple[int, int] | None = None
) -> Tensor:
    """The same for a parameter of a model. With norms behind its halves they are Xavier's, for DeepNorm the smaller the
    deeper it is."""
    if config.knowledge is not None and name.endswith(READING):
        whole = _reading(name, shape, seed, config)
        return whole if rows is None else whole[rows[0] : rows[1]]
    if name.endswith("attention.log_rate"):  # states that fade at rates of up to 16, as Qwen3-Next begins
        rates = _generated(name, shape, seed, lambda rate, generator: rate.uniform_(0.01, 16, generator=generator))
        return rates.log()[slice(*rows) if rows is not None else slice(None)]
    weight = first_weight(name, shape, seed, config.init_std, rows)
    if config.norm_offset and (name == "norm.weight" or name.endswith("_norm.weight")):
        return torch.zeros_like(weight)
    if config.norm == "pre" or not name.startswith("layers.") or len(shape) == 1 or ".router." in name:
        return weight
    weight *= (2 / (shape[-1] + shape[-2])) ** 0.5 / config.init_std  # Xavier's
    attention, small = config.attention, deep_norm(len(config.layers)).beta if config.norm == "deep" else 1.0
    if name.endswith(".attention.qkv.weight") and isinstance(attention, GroupedQuery):
        start, values = rows[0] if rows is not None else 0, (attention.heads + attention.kv_heads) * attention.head_size
        weight[max(values - start, 0) :] *= small
    elif name.endswith(".attention.out.weight") or ".ffn." in name:
        weight *= small
    return weight


READING = (".ffn.query.weight", ".ffn.key.weight", ".ffn.value.weight", ".ffn.threshold.bias")


def _reading(name: str, shape: tuple[int, ...], seed: int, config: ModelConfig) -> Tensor:
    """Of a layer that reads facts: one is first found by its first word, what it is about, and read as the sum of its
    words. From small random matrices neither finding nor reading is of use before the other has been learned."""
    assert config.knowledge is not None
    if name.endswith(".bias"):
        return torch.full(shape, -1.0)  # about where what matches by chance ends
    words, hidden = config.knowledge.words, config.hidden
    if name.endswith(".value.weight"):
        return (0.2 * torch.eye(hidden)).repeat(1, words)
    xavier = (2 / (shape[0] + hidden)) ** 0.5
    query_CD = first_weight(name.replace(".key.", ".query."), (shape[0], hidden), seed, xavier)
    return query_CD if ".query." in name else torch.nn.functional.pad(query_CD, (0, (words - 1) * hidden))


class DeepNorm(NamedTuple):
    alpha: float  # times the stream, before what a layer adds
    beta: float  # times the first weights of values, attention's output and feed-forward networks


def deep_norm(layers: int) -> DeepNorm:
    """Of a decoder of so many layers (DeepNet, Wang et al. 2022), whose updates at the first steps are then bounded."""
    return DeepNorm((2 * layers) ** 0.25, (8 * layers) ** -0.25)


def _normal(name: str, shape: tuple[int, ...], seed: int, std: float) -> Tensor:
    return _generated(name, shape, seed, lambda weight, generator: weight.normal_(0, std, generator=generator))


def _generated(
    name: str, shape: tuple[int, ...], seed: int, draw: Callable[[Tensor, torch.Generator], Tensor]
) -> Tensor:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return draw(torch.empty(shape), generator)
