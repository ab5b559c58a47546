"""SiLU(gate) * up of rows that hold both, in one launch: the bits of the library's two."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

BLOCK = 1024


@triton.jit
def gated_kernel(gate_up_TG, hidden_TF, F, BLOCK: tl.constexpr, PDL: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate_at = gate_up_TG + tl.program_id(0).to(tl.int64) * 2 * F + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_at, mask=column < F, other=0.0).to(tl.float32)
    up = tl.load(gate_at + F, mask=column < F, other=0.0).to(tl.float32)
    kind = hidden_TF.dtype.element_ty
    # Rounded in between, as the library does; for all numbers that bfloat16 has this is its SiLU (tests/gpu).
    hidden = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    tl.store(hidden_TF + tl.program_id(0).to(tl.int64) * F + column, hidden.to(kind), mask=column < F)


def takes(gate_up_TG: torch.Tensor) -> bool:
    return gate_up_TG.is_cuda and gate_up_TG.dtype == torch.bfloat16


def gated(gate_up_TG: torch.Tensor) -> torch.Tensor:
    T, G = gate_up_TG.shape
    hidden_TF = torch.empty(T, G // 2, dtype=gate_up_TG.dtype, device=gate_up_TG.device)
    if T:
        launch_pdl(
            gated_kernel,
            (T, triton.cdiv(G // 2, BLOCK)),
            gate_up_TG.contiguous(),
            hidden_TF,
            G // 2,
            BLOCK=BLOCK,
            PDL=supports_pdl(gate_up_TG.device),
            num_warps=4,
        )
    return hidden_TF
