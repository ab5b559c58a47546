"""Up to a few hundred tokens at a time: rows sorted by expert, bound by how fast the experts' weights can be read.

Many small programs, each with a block of one expert's weights and the few rows that are that expert's. The weights are
the first operand of the tensor cores' matmuls, because those take 64 rows at least and there are not as many tokens.
K is walked in order and never split, as everywhere.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl
from moesaic.kernels.triton.experts.gate import Gate, hidden_of
from moesaic.kernels.triton.experts.grouped import precision
from moesaic.kernels.triton.experts.sort import RECORD, Routing
from moesaic.kernels.triton.experts.tiles import Tile, launch_options


@triton.jit
def streamed_kernel(
    x,
    weights_EOI,
    bias_EG,
    out_PO,
    sources_P,
    tiles,
    totals,
    INPUTS,
    OUTPUTS,
    CHOICES: tl.constexpr,
    PAIR: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    RECORD: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """OUTPUTS columns of a tile's rows, BN at a time. PAIR: gate and up, and what `gate.py` makes of them; the
    matrix has 2 x OUTPUTS rows.
    CHOICES (experts of a token): x is in token order; 0: it is in the order of the routing."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = tl.program_id(1)
    if tile < tl.load(totals):
        record = tiles + tile * RECORD
        expert = tl.load(record).to(tl.int64)
        row = (tile - tl.load(record + 1)) * BM + tl.arange(0, BM)
        valid = row < tl.load(record + 4)
        row = (row + tl.load(record + 3)).to(tl.int64)
        WIDE: tl.constexpr = 2 * BN if PAIR else BN
        pair = tl.arange(0, WIDE)
        n = tl.program_id(0) * BN + pair % BN
        k = tl.arange(0, BK)
        line = expert * OUTPUTS + n
        if PAIR:
            line += (expert + pair // BN) * OUTPUTS
        if CHOICES > 0:
            source = tl.load(sources_P + row, mask=valid, other=0) // CHOICES
        else:
            source = row
        weights_at = weights_EOI + line[:, None] * INPUTS + k[None, :]
        x_at = x + source.to(tl.int64)[None, :] * INPUTS + k[:, None]
        total = tl.zeros([WIDE, BM], tl.float32)
        for base in tl.range(0, INPUTS, BK, num_stages=STAGES):
            inside = k < INPUTS - base
            block = tl.load(weights_at, mask=(n[:, None] < OUTPUTS) & inside[None, :], other=0.0)
            rows = tl.load(x_at, mask=valid[None, :] & inside[:, None], other=0.0)
            total = tl.dot(block, rows, total, input_precision=PRECISION)
            weights_at += BK
            x_at += BK
        kind = out_PO.dtype.element_ty
        if PAIR:
            # Rounded first, as on every path.
            both = total.to(kind).to(tl.float32)
            if bias_EG is not None:
                both += tl.load(bias_EG + line, mask=n < OUTPUTS, other=0.0).to(tl.float32)[:, None]
            gate, up = both.reshape(2, BN, BM).permute(1, 2, 0).split()
            total = hidden_of(gate, up, IS_CLAMPED)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        tl.store(
            out_PO + row[None, :] * OUTPUTS + n[:, None],
            total.to(kind),
            mask=valid[None, :] & (n[:, None] < OUTPUTS),
        )


def rows(
    x: torch.Tensor,
    weights_EOI: torch.Tensor,
    routing: Routing,
    tile: Tile,
    choices: int = 0,
    pair: Gate | None = None,
) -> torch.Tensor:
    """Each row times its expert's matrix, or what the gate `pair` makes of the two halves of that; with `choices`, x
    is in token order."""
    inputs = x.shape[1]
    outputs = weights_EOI.shape[1] // (1 if pair is None else 2)
    out_PO = torch.empty(routing.rows, outputs, dtype=x.dtype, device=x.device)
    launch_pdl(
        streamed_kernel,
        (triton.cdiv(outputs, tile[0]), routing.tiles.shape[0]),
        x,
        weights_EOI,
        None if pair is None else pair.bias_EG,
        out_PO,
        routing.sources_P,
        routing.tiles,
        routing.totals,
        inputs,
        outputs,
        CHOICES=choices,
        PAIR=pair is not None,
        IS_CLAMPED=pair is not None and pair.clamped,
        BM=routing.align,
        RECORD=RECORD,
        PRECISION=precision(x),
        PDL=supports_pdl(x.device),
        **launch_options(tile),
    )
    return out_PO
