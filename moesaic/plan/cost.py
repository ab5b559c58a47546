"""Seconds of one operation on one device: from its flops and bytes, with an efficiency that grows with its size.

The matmul curve was fitted to some 400,000 measured matmuls of A100 to GB300 (docs/plan.md): half of the bf16 ones lie
within 6 % of it, with one set of constants per kind of device.
"""

from __future__ import annotations

import math

from moesaic.plan.hardware import FORMAT_BYTES, Device

TILE = 128
HEAD_HALF = 48.0  # head size at which fused attention has half of its limit
SHORT_TILE = 16  # rows a tile has at least: tensor cores compute that many even for one token


def matmul(m: float, n: float, k: float, device: Device, dtype: str = "bf16", count: float = 1.0) -> float:
    """`count` matmuls of m x k by k x n, one after another or grouped in one launch (`count` experts)."""
    if m <= 0 or n <= 0 or k <= 0 or count <= 0:
        return 0.0
    tiles = math.ceil(m / TILE) * math.ceil(n / TILE) * count
    waves = math.ceil(tiles / device.units)
    filled = (tiles / (waves * device.units)) ** device.wave
    rate = device.sustained(dtype) * k / (k + device.k_half) * filled
    rows = math.ceil(m / SHORT_TILE) * SHORT_TILE
    computing = 2 * rows * n * k * count / rate
    size = FORMAT_BYTES[dtype]
    moving = count * (size * (m * k + n * k) + 2 * m * n) / (device.bandwidth * device.memory)
    # The two overlap; near the ridge neither runs at its full rate.
    return (computing**4 + moving**4) ** 0.25 + device.launch


def elementwise(bytes_: float, device: Device) -> float:
    return bytes_ / (device.bandwidth * device.memory) + device.launch if bytes_ else 0.0


def attention(flops: float, bytes_: float, device: Device, head: float = 128.0) -> float:
    """Fused attention: scores never leave the chip. With narrow heads more of the time goes to the softmax."""
    if not flops:
        return 0.0
    wide = head / (head + HEAD_HALF) * (128 + HEAD_HALF) / 128
    computing = flops / (device.peak("bf16") * device.attention * wide)
    moving = bytes_ / (device.bandwidth * device.memory)
    return (computing**4 + moving**4) ** 0.25 + device.launch
