"""Which kernels and which tiles for a shape: what was found quickest (`tiles.py`), else a rule. Nothing is tuned at
start."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import triton

from moesaic.kernels.triton.dependent_launch import is_hopper
from moesaic.kernels.triton.experts.tiles import Tile, tiles_for

Path = Literal["decode", "streamed", "hopper", "portable"]

MAX_STREAMED_ROWS = 24  # rows of an expert, on average, up to which reading its weights is what takes the time


@dataclass(frozen=True)
class Choice:
    path: Path
    align: int = 128  # rows to which an expert's segment is padded
    block: int = 64  # tile edge of the portable matmuls
    # Tiles are (columns, elements of K, stages, warps). Measured on an H200; all fit in the 99 KB that other GPUs have.
    up_tile: Tile = (16, 256, 4, 4)
    down_tile: Tile = (8, 128, 4, 4)
    group_forward: int = 8  # row tiles that walk the columns together, for the L2 cache
    group: int = 8  # the same in the backward pass
    # Which operands in token order are gathered as they are read, rather than copied in order first.
    gather_x: bool = True
    gather_grad: bool = True
    gather_x_again: bool = True
    chain: bool = True  # SwiGLU's gradient inside the matmul before it


def hopper_takes(x_TD: torch.Tensor, gate_up_EGD: torch.Tensor) -> bool:
    """The Hopper kernels need bf16, and widths that are whole steps of K."""
    D, F = x_TD.shape[1], gate_up_EGD.shape[1] // 2
    return x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and D % 64 == 0 and F % 64 == 0 and is_hopper(x_TD.device)


def streamed(x_TD: torch.Tensor, shape: tuple[int, int, int, int]) -> Choice:
    """`shape`: D, F, experts, experts per token."""
    # So that most experts have one tile.
    align = min(64, max(16, triton.next_power_of_2(3 * len(x_TD) * shape[3] // (2 * shape[2]))))
    if x_TD.dtype == torch.float32:
        return Choice("streamed", align, up_tile=(16, 32, 2, 4), down_tile=(32, 32, 2, 4))
    down_tile = (64, 128, 4, 4) if align == 16 else (64, 64, 6, 4)
    rule = Choice("streamed", align, up_tile=(32, 128, 3, 4), down_tile=down_tile)
    return replace(rule, **tiles_for(x_TD.device, "streamed", shape, align))


def choose(x_TD: torch.Tensor, routes_TK: torch.Tensor, gate_up_EGD: torch.Tensor, training: bool) -> Choice:
    T, D = x_TD.shape
    K, E, F = routes_TK.shape[1], gate_up_EGD.shape[0], gate_up_EGD.shape[1] // 2
    shape = (D, F, E, K)
    # Without sorting, an expert that several tokens share is read by each of them: only while that is rare.
    if not training and K <= 16 and (T == 1 or T * K <= min(32, E // 4)):
        if x_TD.dtype == torch.float32:
            return Choice("decode", up_tile=(16, 64, 3, 4), down_tile=(8, 64, 3, 4))
        return Choice("decode", **tiles_for(x_TD.device, "decode", shape))
    hopper = hopper_takes(x_TD, gate_up_EGD)
    if not training and not (hopper and T * K > MAX_STREAMED_ROWS * E):
        return streamed(x_TD, shape)
    if hopper:
        # Gathering inside a matmul costs it about 4 %, and more with 256 x 128 tiles; a copy beforehand costs the
        # same bytes whatever F is, so wide experts are better off with the copy.
        narrow = F < 2048
        many = T * K >= 2048 * E
        return Choice(
            "hopper",
            group_forward=16 if many else 8,
            group=16 if many else 8,
            gather_x=narrow,
            gather_grad=narrow and F % 256 == 0,
            gather_x_again=narrow and D % 128 == 0,  # no tile of what is gathered may be cut
        )
    return Choice("portable", align=64 if T * K >= 32 * E else 16)
