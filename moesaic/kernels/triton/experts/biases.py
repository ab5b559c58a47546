"""What the biases of a token's experts add to it, in one launch: the bits of the library's operations one by one
(`moesaic.model.experts.weighed_biases`), which round every product and every sum.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl


@triton.jit
def weighed_biases_kernel(
    routes_TK, weights_TK, bias_ED, out_TD, D, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind = out_TD.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        expert = tl.maximum(tl.load(routes_TK + token * K + k), 0).to(tl.int64)  # -1: a row that is no token
        weight = tl.load(weights_TK + token * K + k).to(kind).to(tl.float32)
        bias = tl.load(bias_ED + expert * D + column, mask=column < D, other=0.0).to(tl.float32)
        total = (total + (weight * bias).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out_TD + token * D + column, total.to(kind), mask=column < D)


def weighed_biases(routes_TK: torch.Tensor, weights_TK: torch.Tensor, bias_ED: torch.Tensor) -> torch.Tensor:
    (T, K), D = routes_TK.shape, bias_ED.shape[1]
    out_TD = torch.empty(T, D, dtype=bias_ED.dtype, device=bias_ED.device)
    block = min(1024, triton.next_power_of_2(D))
    launch_pdl(
        weighed_biases_kernel,
        (T, triton.cdiv(D, block)),
        routes_TK,
        weights_TK,
        bias_ED,
        out_TD,
        D,
        K=K,
        BLOCK=block,
        PDL=supports_pdl(bias_ED.device),
        # Else the compiler makes both roundings of a term one: a product and a sum in bf16 become a fused one.
        enable_fp_fusion=False,
        num_warps=4,
    )
    return out_TD
