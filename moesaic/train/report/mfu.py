"""Model FLOPs utilization (MFU): the FLOPs a training step needs, against the matmul throughput of this machine.

    share = tokens_per_second * flops_per_token(config, context=1024) / peak_flops(device, torch.bfloat16)
    share = step_flops(config, lengths) / seconds / peak_flops(device, torch.bfloat16)

Counted is what the model needs (forward once, backward twice), not what was spent: recomputed activations, idle experts
and dropped tokens do not raise it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import torch

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig
from moesaic.model.facts import facts


def step_flops(config: ModelConfig, lengths: Sequence[int]) -> float:
    """Of training on sequences of these lengths, once each."""
    tokens = sum(lengths)
    # A token of a long sequence sees more keys, and there are more such tokens.
    return tokens * flops_per_token(config, sum(length * length for length in lengths) / max(tokens, 1))


def flops_per_token(config: ModelConfig, context: float, predictions: bool = True) -> float:
    """Of training on sequences of `context` tokens on average: six for each parameter a token passes, and attention.

    With `predictions`, the layers that predict further tokens are trained too.
    """
    known = _facts(config)
    parameters = known.active_parameters
    layers = config.layers
    if predictions and config.mtp:
        idle = sum(_idle(layer, config.hidden) for layer in config.mtp)
        parameters += known.prediction_parameters - idle + len(config.mtp) * config.vocab * config.hidden
        layers += config.mtp
    return 6.0 * parameters + sum(_attention(config, layer, context) for layer in layers)


_facts = cache(facts)  # it makes the whole model, without its weights


def _attention(config: ModelConfig, layer: Layer, context: float) -> float:
    """Scores and weighted sum: four per key and dimension forward, eight backward."""
    shape = config.attention
    if isinstance(shape, GroupedQuery):
        width, limit = float(shape.heads * shape.head_size), layer.window
    else:
        width = shape.heads * (shape.key_size + shape.value_size) / 2
        limit = shape.indexer.topk if layer.index and shape.indexer else layer.window
    return 12.0 * width * _keys(context, limit)


def _keys(context: float, limit: int | None) -> float:
    """How many keys a query sees on average: half the sequence, less where no query sees more than `limit`."""
    if limit is None or limit >= context:
        return context / 2
    return limit - limit**2 / (2 * context)


def _idle(layer: Layer, hidden: int) -> int:
    ffn = layer.ffn
    return (ffn.count - ffn.per_token) * 3 * ffn.hidden * hidden if isinstance(ffn, Experts) else 0


@cache
def peak_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """FLOP/s of the best of a few large square matmuls: measured once per process, and what MFU is a share of."""
    size, largest = (8192, 8192) if device.type == "cuda" else (128, 1024)
    best = _fastest(device, dtype, size, 0.0)
    # A processor that has no instructions for a dtype takes hundreds of times as long: such are judged by small ones.
    while size < largest and 8 * best < seconds:
        size *= 2
        best = _fastest(device, dtype, size, 0.0)
    return 2.0 * size**3 / min(best, _fastest(device, dtype, size, seconds))


def _fastest(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    """The shortest time of some matmuls, at least one."""
    a = torch.randn(size, size, device=device, dtype=torch.float32, generator=_generator(device)).to(dtype)
    out = torch.empty_like(a)

    def matmul() -> float:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    matmul()  # the first one also chooses kernels and takes memory
    end = time.perf_counter() + seconds
    best = matmul()
    while time.perf_counter() < end:
        best = min(best, matmul())
    return best


def _generator(device: torch.device) -> torch.Generator:
    """A generator of its own: measuring must not change the run's random numbers."""
    return torch.Generator(device=device).manual_seed(0)
