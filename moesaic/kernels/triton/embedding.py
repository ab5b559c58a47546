"""Rows of the embedding, where a token may be one that only the device knows."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl


@triton.jit
def embed_kernel(tokens_T, slots_T, chosen_S, embed_VD, x_TD, D, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    given = tl.load(tokens_T + row)
    own = tl.load(chosen_S + tl.load(slots_T + row))
    token = tl.where(given < 0, own, given).to(tl.int64)
    column = tl.arange(0, BLOCK)
    tl.store(x_TD + row * D + column, tl.load(embed_VD + token * D + column, mask=column < D), mask=column < D)


def embed(
    tokens_T: torch.Tensor, slots_T: torch.Tensor, chosen_S: torch.Tensor, embed_VD: torch.Tensor
) -> torch.Tensor:
    """Each token's row; a token of -1 is the one that was last chosen for its slot."""
    T, D = tokens_T.shape[0], embed_VD.shape[1]
    x_TD = torch.empty(T, D, dtype=embed_VD.dtype, device=embed_VD.device)
    embed_kernel[(T,)](tokens_T, slots_T, chosen_S, embed_VD, x_TD, D, BLOCK=triton.next_power_of_2(D), num_warps=4)
    return x_TD
