"""Low-rank corrections of a matmul (LoRA), of another adapter for every row: y += (x A^T) B^T.

    add_low_rank(out_TO, x_TI, LowRank(down_NRI, up_NOR), adapters_T)       rows of adapter 0 are left as they are

Two launches, however many adapters there are. A row's bits do not depend on the rows beside it: inputs are summed in
pieces whose number depends on their width alone, and a tile that holds rows of several adapters runs once for each.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moesaic.kernels.triton.launch import launch

ROWS = 16  # of a tile: the fewest a tensor core takes
PIECE = 512  # inputs that one program sums: a single row must keep more than one multiprocessor busy
STEP = 128
COLUMNS = 128
MAX_RANK = 512  # so that tiles fit into shared memory


@dataclass(frozen=True)
class LowRank:
    """The matrices of adapters at one site; the first is nobody's. R is a power of two, 16 at least, of which an
    adapter uses what its rank is; the rest is zeros."""

    down_NRI: torch.Tensor
    up_NOR: torch.Tensor

    @classmethod
    def empty(cls, adapters: int, rank: int, down_RI: torch.Tensor, up_OR: torch.Tensor) -> LowRank:
        """Room for so many adapters of at most this rank, for matrices like these."""
        size = max(ROWS, triton.next_power_of_2(rank))
        return cls(
            down_RI.new_zeros(adapters + 1, size, down_RI.shape[1]), up_OR.new_zeros(adapters + 1, len(up_OR), size)
        )

    @property
    def rank(self) -> int:
        return self.down_NRI.shape[1]

    def write(self, number: int, matrices: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """An adapter's, or that it has none here."""
        self.down_NRI[number].zero_()
        self.up_NOR[number].zero_()
        if matrices is not None:
            down_RI, up_OR = matrices
            self.down_NRI[number, : len(down_RI)] = down_RI
            self.up_NOR[number, :, : len(down_RI)] = up_OR


@triton.jit
def down_kernel(
    x_TI,
    down_NRI,
    adapters_T,
    low_PTR,
    T,
    WIDTH,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    rank = tl.arange(0, R)
    left = tl.load(adapters_T + row, mask=row < T, other=0)
    x_at = x_TI + row[:, None].to(tl.int64) * WIDTH
    low_at = low_PTR + (piece * T + row[:, None]).to(tl.int64) * R + rank[None, :]
    now = tl.max(left, 0)
    while now > 0:
        low = tl.zeros((ROWS, R), tl.float32)
        down_at = down_NRI + now.to(tl.int64) * R * WIDTH + rank[None, :] * WIDTH
        for start in range(0, PIECE, STEP):
            i = piece * PIECE + start + tl.arange(0, STEP)
            x = tl.load(x_at + i[None, :], mask=(row[:, None] < T) & (i[None, :] < WIDTH), other=0.0)
            down = tl.load(down_at + i[:, None], mask=i[:, None] < WIDTH, other=0.0)
            low = tl.dot(x, down, low, input_precision="ieee")
        tl.store(low_at, low, mask=(left == now)[:, None])
        left = tl.where(left == now, 0, left)
        now = tl.max(left, 0)


@triton.jit
def up_kernel(
    low_PTR,
    up_NOR,
    adapters_T,
    out_TO,
    T,
    OUTPUTS,
    PIECES,
    R: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    rank = tl.arange(0, R)
    left = tl.load(adapters_T + row, mask=row < T, other=0)
    now = tl.max(left, 0)
    if now > 0:
        low = tl.zeros((ROWS, R), tl.float32)
        for piece in range(0, PIECES):
            low_at = low_PTR + (piece * T + row[:, None]).to(tl.int64) * R + rank[None, :]
            low += tl.load(low_at, mask=(left > 0)[:, None], other=0.0)
        x = low.to(up_NOR.dtype.element_ty)
        out_at = out_TO + row[:, None].to(tl.int64) * OUTPUTS + column[None, :]
        while now > 0:
            up_at = up_NOR + now.to(tl.int64) * OUTPUTS * R + column[None, :] * R + rank[:, None]
            up = tl.load(up_at, mask=column[None, :] < OUTPUTS, other=0.0)
            more = tl.dot(x, up, input_precision="ieee")
            mask = (left == now)[:, None] & (column[None, :] < OUTPUTS)
            out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_at, (out + more).to(out_TO.dtype.element_ty), mask=mask)
            left = tl.where(left == now, 0, left)
            now = tl.max(left, 0)


def add_low_rank(out_TO: torch.Tensor, x_TI: torch.Tensor, matrices: LowRank, adapters_T: torch.Tensor) -> torch.Tensor:
    """Adds to `out_TO` in place, and returns it. `adapters_T` (int32) is each row's adapter, 0 where it has none."""
    (tokens, outputs), (_, rank, width) = out_TO.shape, matrices.down_NRI.shape
    pieces, tiles = triton.cdiv(width, PIECE), triton.cdiv(tokens, ROWS)
    low_PTR = torch.empty(pieces, tokens, rank, dtype=torch.float32, device=out_TO.device)
    launch(
        down_kernel,
        (tiles, pieces),
        x_TI.contiguous(),
        matrices.down_NRI,
        adapters_T,
        low_PTR,
        tokens,
        width,
        R=rank,
        ROWS=ROWS,
        PIECE=PIECE,
        STEP=min(STEP, STEP * STEP // rank),
        num_warps=4,
    )
    launch(
        up_kernel,
        (tiles, triton.cdiv(outputs, COLUMNS)),
        low_PTR,
        matrices.up_NOR,
        adapters_T,
        out_TO,
        tokens,
        outputs,
        pieces,
        R=rank,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return out_TO
