"""The two searches of compression that go from input to input, for a block of inputs in one launch.

Each step reads what the one before it changed, so that as single operations they are thousands of launches a matrix;
but outputs are independent of each other, so that one program can walk the block for some of them in registers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

ROWS = 16  # outputs of a program
HALVES = tl.constexpr(12582912.0)  # added and taken away again, it rounds to the nearest integer, halves to even


@triton.jit
def corrected_kernel(
    left_OI,
    scales_OI,
    zeros_OI,
    kept_OI,
    upper_II,
    codes_OI,
    errors_OI,
    outputs,
    count,
    width,
    top,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDE)
    inside = (o[:, None] < outputs) & (i[None, :] < count)
    at = o[:, None].to(tl.int64) * width + i[None, :]
    left = tl.load(left_OI + at, mask=inside, other=0.0)
    scales = tl.load(scales_OI + at, mask=inside, other=1.0)
    zeros = tl.load(zeros_OI + at, mask=inside, other=0.0)
    kept = inside
    if kept_OI is not None:
        kept = tl.load(kept_OI + at, mask=inside, other=0) != 0
    codes = tl.zeros_like(left)
    errors = tl.zeros_like(left)
    for step in range(count):
        mine = i[None, :] == step
        column = tl.sum(tl.where(mine, left, 0.0), 1)
        scale = tl.sum(tl.where(mine, scales, 0.0), 1)
        zero = tl.sum(tl.where(mine, zeros, 0.0), 1)
        code = (column / scale + zero + HALVES) - HALVES
        code = tl.minimum(tl.maximum(code, 0.0), top)
        if kept_OI is not None:
            code = tl.where(tl.sum(tl.where(mine, kept.to(tl.int32), 0), 1) != 0, code, zero)
        row = tl.load(upper_II + step * width + i, mask=(i >= step) & (i < count), other=0.0)
        error = (column - (code - zero) * scale) / tl.load(upper_II + step * width + step)
        left -= error[:, None] * row[None, :]
        codes = tl.where(mine, code[:, None], codes)
        errors = tl.where(mine, error[:, None], errors)
    tl.store(codes_OI + at, codes, mask=inside)
    own = o[:, None].to(tl.int64) * count + i[None, :]
    tl.store(errors_OI + own, errors, mask=inside)


def corrected(
    left_OI: torch.Tensor,
    scales_OI: torch.Tensor,
    zeros_OI: torch.Tensor,
    kept_OI: torch.Tensor | None,
    upper_II: torch.Tensor,
    codes_OI: torch.Tensor,
    start: int,
    stop: int,
    top: int,
) -> torch.Tensor:
    """GPTQ's codes of inputs start to stop, each with what those before it left to be made up for; returns the errors
    (O, stop - start) that the inputs after them are to make up for. All are contiguous and as wide as the matrix."""
    outputs, width = left_OI.shape
    errors_OI = left_OI.new_empty(outputs, stop - start)
    corrected_kernel[(triton.cdiv(outputs, ROWS),)](
        left_OI[:, start:],
        scales_OI[:, start:],
        zeros_OI[:, start:],
        None if kept_OI is None else kept_OI[:, start:],
        upper_II[start:, start:],
        codes_OI[:, start:],
        errors_OI,
        outputs,
        stop - start,
        width,
        float(top),
        WIDE=triton.next_power_of_2(stop - start),
        ROWS=ROWS,
        num_warps=4,
    )
    return errors_OI


@triton.jit
def among_others_kernel(
    pull_IO,
    codes_IO,
    scales_IO,
    per_code_IO,
    moments_II,
    moves_IO,
    outputs,
    count,
    inputs,
    top,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    o = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WIDE)
    inside = (i[:, None] < count) & (o[None, :] < outputs)
    at = i[:, None].to(tl.int64) * outputs + o[None, :]
    pull = tl.load(pull_IO + at, mask=inside, other=0.0)
    codes = tl.load(codes_IO + at, mask=inside, other=0.0)
    scales = tl.load(scales_IO + at, mask=inside, other=1.0)
    per_code = tl.load(per_code_IO + at, mask=inside, other=0.0)
    moves = tl.zeros_like(pull)
    for step in range(count):
        mine = i[:, None] == step
        old = tl.sum(tl.where(mine, codes, 0.0), 0)
        far = tl.sum(tl.where(mine, pull * per_code, 0.0), 0)
        new = (old + far + HALVES) - HALVES
        new = tl.minimum(tl.maximum(new, 0.0), top)
        move = (new - old) * tl.sum(tl.where(mine, scales, 0.0), 0)
        column = tl.load(moments_II + i.to(tl.int64) * inputs + step, mask=i < count, other=0.0)
        pull -= column[:, None] * move[None, :]
        codes = tl.where(mine, new[None, :], codes)
        moves = tl.where(mine, move[None, :], moves)
    tl.store(codes_IO + at, codes, mask=inside)
    tl.store(moves_IO + at, moves, mask=inside)


def among_others(
    pull_IO: torch.Tensor,
    codes_IO: torch.Tensor,
    scales_IO: torch.Tensor,
    per_code_IO: torch.Tensor,
    moments_II: torch.Tensor,
    start: int,
    stop: int,
    top: int,
) -> torch.Tensor:
    """Codes of inputs start to stop anew, each where the error is least while all others stay; returns how far the
    weights moved (stop - start, O). All are contiguous."""
    inputs, outputs = pull_IO.shape
    moves_IO = torch.empty_like(pull_IO[start:stop])
    among_others_kernel[(triton.cdiv(outputs, ROWS),)](
        pull_IO[start:stop],
        codes_IO[start:stop],
        scales_IO[start:stop],
        per_code_IO[start:stop],
        moments_II[start:, start:],
        moves_IO,
        outputs,
        stop - start,
        inputs,
        float(top),
        WIDE=triton.next_power_of_2(stop - start),
        ROWS=ROWS,
        num_warps=4,
    )
    return moves_IO
