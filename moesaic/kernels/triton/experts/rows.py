"""The memory-bound passes between the matmuls: permute rows, combine rows, SwiGLU and its gradient.

All are written so that a token's numbers depend on that token alone: a fixed order over k, no atomics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl
from moesaic.kernels.triton.experts.gate import PLAIN, Gate, gradients_of, hidden_of
from moesaic.kernels.triton.experts.sort import RECORD, Routing
from moesaic.kernels.triton.launch import launch


@triton.jit
def permute_rows(
    x_TD,
    slots_N,
    segments_E,
    out_PD,
    T,
    D,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RECORD: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program per token reads its row once and writes it K times; one per expert clears the padding that a sum over
    rows in steps of STEP will read."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = column < D
    if program < T:
        x = tl.load(x_TD + program.to(tl.int64) * D + column, mask=inside, other=0.0)
        for k in tl.static_range(K):
            slot = tl.load(slots_N + program * K + k).to(tl.int64)
            tl.store(out_PD + slot * D + column, x, mask=column < tl.where(slot >= 0, D, 0))
    else:
        record = segments_E + (program - T) * RECORD
        start = tl.load(record + 3)
        count = tl.load(record + 4)
        nothing = tl.zeros([BLOCK_D], out_PD.dtype.element_ty)
        for row in range(count, (count + STEP - 1) // STEP * STEP):
            tl.store(out_PD + (start + row).to(tl.int64) * D + column, nothing, mask=inside)


def permute(x_TD: torch.Tensor, routing: Routing, k: int) -> torch.Tensor:
    """x's rows in the order of the routing, (P, D), each expert's padded with zeros to a multiple of 64 rows."""
    T, D = x_TD.shape
    out_PD = torch.empty(routing.rows, D, dtype=x_TD.dtype, device=x_TD.device)
    block = min(2048, triton.next_power_of_2(D))
    launch(
        permute_rows,
        (T + routing.segments_E.shape[0], triton.cdiv(D, block)),
        x_TD,
        routing.slots_N,
        routing.segments_E,
        out_PD,
        T,
        D,
        K=k,
        BLOCK_D=block,
        RECORD=RECORD,
        STEP=min(64, routing.align),
        num_warps=4,
    )
    return out_PD


@triton.jit
def combine_rows(
    rows_PD,
    slots_N,
    weights_N,
    out_TD,
    D,
    K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slots_N + token * K + k).to(tl.int64)
        row = tl.load(rows_PD + slot * D + column, mask=column < tl.where(slot >= 0, D, 0), other=0.0).to(tl.float32)
        if WEIGHTED:
            total += tl.load(weights_N + token * K + k) * row
        else:
            total += row
    tl.store(out_TD + token * D + column, total.to(out_TD.dtype.element_ty), mask=column < D)


def combine(
    rows_PD: torch.Tensor, routing: Routing, weights_TK: torch.Tensor | None, tokens: int, k: int
) -> torch.Tensor:
    """Sum each token's k rows, in the order of k, in float32."""
    D = rows_PD.shape[1]
    out_TD = torch.empty(tokens, D, dtype=rows_PD.dtype, device=rows_PD.device)
    block = min(2048, triton.next_power_of_2(D))
    weights = rows_PD if weights_TK is None else weights_TK
    launch_pdl(
        combine_rows,
        (tokens, triton.cdiv(D, block)),
        rows_PD,
        routing.slots_N,
        weights,
        out_TD,
        D,
        K=k,
        BLOCK_D=block,
        WEIGHTED=weights_TK is not None,
        PDL=supports_pdl(rows_PD.device),
        num_warps=4,
    )
    return out_TD


def combine_tokens(rows_ND: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The same for rows in the order of tokens and their choices."""
    T, K = weights_TK.shape
    slots_N = torch.arange(T * K, dtype=torch.int32, device=rows_ND.device)
    nothing = slots_N[:0]
    return combine(rows_ND, Routing(slots_N, slots_N, nothing, nothing, nothing, nothing, 1), weights_TK, T, K)


@triton.jit
def swiglu_rows(
    gate_up_PG,
    bias_EG,
    tiles,
    totals,
    hidden_PF,
    F,
    IS_CLAMPED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_F: tl.constexpr,
    RECORD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    gate = tl.load(gate_up_PG + row * 2 * F + column, mask=column < F, other=0.0).to(tl.float32)
    up = tl.load(gate_up_PG + row * 2 * F + F + column, mask=column < F, other=0.0).to(tl.float32)
    if bias_EG is not None:
        tile = row // ALIGN
        expert = tl.load(tiles + tile * RECORD, mask=tile < tl.load(totals), other=0).to(tl.int64)
        gate += tl.load(bias_EG + expert * 2 * F + column, mask=column < F, other=0.0).to(tl.float32)
        up += tl.load(bias_EG + expert * 2 * F + F + column, mask=column < F, other=0.0).to(tl.float32)
    hidden = hidden_of(gate, up, IS_CLAMPED)
    tl.store(hidden_PF + row * F + column, hidden.to(hidden_PF.dtype.element_ty), mask=column < F)


def swiglu(gate_up_PG: torch.Tensor, gate: Gate = PLAIN, routing: Routing | None = None) -> torch.Tensor:
    """What a gate makes of both; a bias is of the expert whose row it is by the `routing`."""
    rows, G = gate_up_PG.shape
    hidden_PF = torch.empty(rows, G // 2, dtype=gate_up_PG.dtype, device=gate_up_PG.device)
    block = min(1024, triton.next_power_of_2(G // 2))
    swiglu_rows[(rows, triton.cdiv(G // 2, block))](
        gate_up_PG,
        gate.bias_EG,
        None if routing is None else routing.tiles,
        None if routing is None else routing.totals,
        hidden_PF,
        G // 2,
        IS_CLAMPED=gate.clamped,
        ALIGN=1 if routing is None else routing.align,
        BLOCK_F=block,
        RECORD=RECORD,
        num_warps=4,
    )
    return hidden_PF


@triton.jit
def swiglu_backward_rows(
    grad_hidden_PF,
    gate_up_PG,
    bias_EG,
    weights_N,
    sources_P,
    tiles,
    totals,
    grad_gate_up_PG,
    grad_weights_N,
    F,
    IS_CLAMPED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_F: tl.constexpr,
    RECORD: tl.constexpr,
):
    """From the gradient of an unweighted expert output's hidden row: that of gate and up, of the routing weight, and
    (in place of the incoming gradient) the weighted hidden row that the gradient of `down` needs. Padding becomes
    zero."""
    row = tl.program_id(0)
    tile = row // ALIGN
    if tile < tl.load(totals):
        record = tiles + tile * RECORD
        valid = row - tl.load(record + 3) < tl.load(record + 4)
        source = tl.where(valid, tl.load(sources_P + row), 0)
        weight = tl.where(valid, tl.load(weights_N + source), 0.0)
        width = tl.where(valid, F, 0)
        wide = row.to(tl.int64)
        dot = tl.zeros([BLOCK_F], tl.float32)
        for base in range(0, F, BLOCK_F):
            column = base + tl.arange(0, BLOCK_F)
            kept = column < width
            gate = tl.load(gate_up_PG + wide * 2 * F + column, mask=kept, other=0.0).to(tl.float32)
            up = tl.load(gate_up_PG + wide * 2 * F + F + column, mask=kept, other=0.0).to(tl.float32)
            if bias_EG is not None:
                bias_at = bias_EG + tl.load(record).to(tl.int64) * 2 * F + column
                gate += tl.load(bias_at, mask=kept, other=0.0).to(tl.float32)
                up += tl.load(bias_at + F, mask=kept, other=0.0).to(tl.float32)
            grad = tl.load(grad_hidden_PF + wide * F + column, mask=kept, other=0.0).to(tl.float32)
            hidden = hidden_of(gate, up, IS_CLAMPED)
            dot += grad * hidden
            grad_gate, grad_up = gradients_of(grad * weight, gate, up, IS_CLAMPED)
            inside = column < F
            kind = grad_gate_up_PG.dtype.element_ty
            tl.store(grad_gate_up_PG + wide * 2 * F + column, grad_gate.to(kind), mask=inside)
            tl.store(grad_gate_up_PG + wide * 2 * F + F + column, grad_up.to(kind), mask=inside)
            tl.store(grad_hidden_PF + wide * F + column, (weight * hidden).to(kind), mask=inside)
        if valid:
            tl.store(grad_weights_N + source, tl.sum(dot, 0))


def swiglu_backward(
    grad_hidden_PF: torch.Tensor,
    gate_up_PG: torch.Tensor,
    weights_TK: torch.Tensor,
    routing: Routing,
    in_place: bool,
    gate: Gate = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(gradient of gate and up, gradient of the routing weights); `grad_hidden_PF` becomes the weighted hidden rows."""
    rows, F = grad_hidden_PF.shape
    grad_gate_up_PG = gate_up_PG if in_place else torch.empty_like(gate_up_PG)
    grad_weights_TK = torch.empty_like(weights_TK)
    swiglu_backward_rows[(rows,)](
        grad_hidden_PF,
        gate_up_PG,
        gate.bias_EG,
        weights_TK,
        routing.sources_P,
        routing.tiles,
        routing.totals,
        grad_gate_up_PG,
        grad_weights_TK,
        F,
        IS_CLAMPED=gate.clamped,
        ALIGN=routing.align,
        BLOCK_F=min(1024, triton.next_power_of_2(F)),
        RECORD=RECORD,
        num_warps=4,
    )
    return grad_gate_up_PG, grad_weights_TK


@triton.jit
def sum_segments_kernel(rows_PX, segments_E, out_EX, X, BLOCK: tl.constexpr, STEP: tl.constexpr, RECORD: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(segments_E + expert * RECORD + 3).to(tl.int64)
    count = tl.load(segments_E + expert * RECORD + 4)
    line = tl.arange(0, STEP)
    total = tl.zeros([BLOCK], tl.float32)
    for base in range(0, count, STEP):
        kept = (base + line < count)[:, None] & (column < X)[None, :]
        at = rows_PX + (start + base + line)[:, None] * X + column[None, :]
        total += tl.sum(tl.load(at, mask=kept, other=0.0).to(tl.float32), 0)
    tl.store(out_EX + expert * X + column, total.to(out_EX.dtype.element_ty), mask=column < X)


def sum_segments(rows_PX: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Of every expert's rows, (E, X): the gradient of a bias."""
    E, X = routing.segments_E.shape[0], rows_PX.shape[1]
    out_EX = torch.empty(E, X, dtype=rows_PX.dtype, device=rows_PX.device)
    block = min(128, triton.next_power_of_2(X))
    sum_segments_kernel[(E, triton.cdiv(X, block))](
        rows_PX, routing.segments_E, out_EX, X, BLOCK=block, STEP=32, RECORD=RECORD, num_warps=4
    )
    return out_EX


@triton.jit
def sum_parts_kernel(parts_XP, slots_N, out_N, assignments, rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_N + at, mask=at < assignments, other=0)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(parts_XP + part * rows + slot, mask=at < assignments, other=0.0)
    tl.store(out_N + at, total, mask=at < assignments)


def sum_parts(parts_XP: torch.Tensor, routing: Routing, like_TK: torch.Tensor) -> torch.Tensor:
    """Add each assignment's parts, in their order."""
    out_TK = torch.empty_like(like_TK)
    launch(
        sum_parts_kernel,
        (triton.cdiv(like_TK.numel(), 256),),
        parts_XP,
        routing.slots_N,
        out_TK,
        like_TK.numel(),
        routing.rows,
        PARTS=parts_XP.shape[0],
        BLOCK=256,
        num_warps=4,
    )
    return out_TK
