"""Rows of the embedding, where a token may be one that only the device knows."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

from moesaic.kernels.triton.quantized.packed_weight import ZERO_POINT, PackedWeight


@triton.jit
def embed_kernel(
    tokens_T,
    slots_T,
    sampled_S,
    embed_VD,
    scales_GV,
    zeros_GV,
    x_TD,
    V,
    D,
    WIDTH,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens_T + row).to(tl.int64)
    if slots_T is not None:
        token = tl.where(token < 0, tl.load(sampled_S + tl.load(slots_T + row)), token)
    column = tl.arange(0, BLOCK)
    inside = column < D
    if scales_GV is None:
        values = tl.load(embed_VD + token * D + column, mask=inside)
    else:
        group = column // GROUP * V + token
        byte = column % HALF
        if HALF == 64:  # words lie as columns of a square
            byte = byte // 4 % 4 * 16 + byte // 16 * 4 + byte % 4
        if BITS == 8:
            at = column // HALF * HALF + byte
            codes = tl.load(embed_VD + token * WIDTH + at, mask=inside, other=0).to(tl.float32)
        else:
            at = column // (2 * HALF) * HALF + byte
            both = tl.load(embed_VD + token * WIDTH + at, mask=inside, other=0).to(tl.int32)
            codes = ((both >> (column // HALF % 2 * 4)) & 15).to(tl.float32)
        codes -= ZERO_POINT
        if zeros_GV is not None:
            codes -= tl.load(zeros_GV + group, mask=inside, other=0.0).to(tl.float32)
        values = codes * tl.load(scales_GV + group, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_TD + row * D + column, values.to(x_TD.dtype.element_ty), mask=inside)


def embed(
    tokens_T: torch.Tensor,
    slots_T: torch.Tensor | None,
    sampled_S: torch.Tensor | None,
    embed_VD: torch.Tensor | PackedWeight,
) -> torch.Tensor:
    """Each token's row; a token of -1 is the one that was last chosen for its slot."""
    T, (V, D) = tokens_T.shape[0], embed_VD.shape
    x_TD = torch.empty(T, D, dtype=embed_VD.dtype, device=embed_VD.device)
    table, scales, zeros, facts = embed_VD, None, None, (0, 0, 0)
    width = D
    if isinstance(embed_VD, PackedWeight):
        table, scales, zeros = embed_VD.codes_EOB, embed_VD.scales_EGO, embed_VD.zeros_EGO
        facts, width = (embed_VD.group, embed_VD.bits, embed_VD.half_width), embed_VD.codes_EOB.shape[2]
    group, bits, half = facts
    if T:
        embed_kernel[(T,)](
            tokens_T, slots_T, sampled_S, table, scales, zeros, x_TD, V, D, width, GROUP=group, BITS=bits, HALF=half,
            ZERO_POINT=ZERO_POINT.get(bits, 0), BLOCK=triton.next_power_of_2(D), num_warps=4,
        )  # fmt: skip
    return x_TD
