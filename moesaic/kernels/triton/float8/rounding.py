"""Round rows to float8 in the form that the matmuls of many rows read: in their experts' order, scales by group.

    x8_PI, scales_GP = round_sorted(x_TI, routing, K)

And weights in the two forms that training reads, since float8 tensor cores want what is summed over side by side.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from moesaic.kernels.float8 import BLOCK
from moesaic.kernels.triton.experts.sort import Routing
from moesaic.kernels.triton.launch import launch

GROUPS = 8  # of inputs that a program rounds
WHOLE = 256  # rows of scales are filled up to multiples of this: what reads them reads whole tiles


class Rounded(NamedTuple):
    """Float8 numbers and their scales: of rows by group (G, P), of matrices by block (E, N, G)."""

    numbers: torch.Tensor
    scales: torch.Tensor


class BothWays(NamedTuple):
    """Matrices as they are and turned about their diagonal: equal numbers and scales, in another order."""

    straight: Rounded  # (E, O, I)
    turned: Rounded  # (E, I, O)


@triton.jit
def round_sorted_kernel(
    x_TI,
    slots_N,
    x8_PI,
    scales_GP,
    INPUTS,
    STRIDE,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is read once, and written for each of its K assignments. The operations of `round_kernel`, to its bits."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < INPUTS
    x = tl.load(x_TI + row * INPUTS + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 1) / 448.0, 1e-12)
    numbers = (x / scale[:, None]).to(tl.float8e4nv)
    groups = tl.cdiv(INPUTS, BLOCK)
    # All slots at once: one by one, each would be waited for behind the stores before it.
    choice = tl.arange(0, CHOICES)
    slots = row + tl.zeros([CHOICES], tl.int64)
    if slots_N is not None:
        slots = tl.load(slots_N + row * K + choice, mask=choice < K, other=-1).to(tl.int64)
    for k in tl.static_range(K):
        slot = tl.sum(tl.where(choice == k, slots, 0), 0)
        kept = slot >= 0
        tl.store(x8_PI + slot * INPUTS + column, numbers, mask=inside & kept)
        tl.store(scales_GP + group.to(tl.int64) * STRIDE + slot, scale, mask=(group < groups) & kept)


def row_stride(rows: int) -> int:
    """From the scales of one group of all rows to those of the next."""
    return triton.cdiv(rows, WHOLE) * WHOLE


def round_sorted(x_TI: torch.Tensor, routing: Routing | None = None, choices: int = 1) -> Rounded:
    """Numbers, and scales of each group of all rows. With a routing, rows are those of assignments."""
    T, inputs = x_TI.shape
    P = T if routing is None else routing.rows
    stride = row_stride(P)
    x8_PI = torch.empty(P, inputs, dtype=torch.float8_e4m3fn, device=x_TI.device)
    scales_GP = torch.empty(triton.cdiv(inputs, BLOCK), stride, dtype=torch.float32, device=x_TI.device)
    if T:
        launch(
            round_sorted_kernel,
            (T, triton.cdiv(inputs, GROUPS * BLOCK)),
            x_TI.contiguous(),
            None if routing is None else routing.slots_N,
            x8_PI,
            scales_GP,
            inputs,
            stride,
            K=choices,
            CHOICES=triton.next_power_of_2(choices),
            GROUPS=GROUPS,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return Rounded(x8_PI, scales_GP)


@triton.jit
def round_both_ways_kernel(
    weight_EOI, numbers_EOI, scales_ENG, numbers_EIO, scales_EGN, OUTPUTS, INPUTS, BLOCK: tl.constexpr
):
    """One block of one matrix."""
    expert, group, block = tl.program_id(2).to(tl.int64), tl.program_id(0), tl.program_id(1)
    blocks, groups = tl.cdiv(OUTPUTS, BLOCK), tl.cdiv(INPUTS, BLOCK)
    o = block * BLOCK + tl.arange(0, BLOCK)[:, None]
    i = group * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (o < OUTPUTS) & (i < INPUTS)
    at = (expert * OUTPUTS + o) * INPUTS + i
    weight = tl.load(weight_EOI + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.max(tl.abs(weight), 1), 0) / 448.0, 1e-12)
    numbers = (weight / scale).to(tl.float8e4nv)
    tl.store(numbers_EOI + at, numbers, mask=inside)
    tl.store(scales_ENG + (expert * blocks + block) * groups + group, scale)
    turned_at = (expert * INPUTS + tl.trans(i)) * OUTPUTS + tl.trans(o)
    tl.store(numbers_EIO + turned_at, tl.trans(numbers), mask=tl.trans(inside))
    tl.store(scales_EGN + (expert * groups + group) * blocks + block, scale)


def round_both_ways(weight_EOI: torch.Tensor) -> BothWays:
    E, outputs, inputs = weight_EOI.shape
    blocks, groups = triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)

    def made(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=weight_EOI.device)

    straight, turned = (
        Rounded(made(E, *sides, dtype=torch.float8_e4m3fn), made(E, *parts, dtype=torch.float32))
        for sides, parts in (((outputs, inputs), (blocks, groups)), ((inputs, outputs), (groups, blocks)))
    )
    launch(
        round_both_ways_kernel,
        (groups, blocks, E),
        weight_EOI.contiguous(),
        *straight,
        *turned,
        outputs,
        inputs,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return BothWays(straight, turned)
