"""The two ends of a serving step: rows of the embedding in, and a count of the experts that were chosen."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl

COUNTED = 1024  # choices counted by one program


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


@triton.jit
def count_kernel(routes_LN, starts_L, counts, N, experts, COUNTED: tl.constexpr, BINS: tl.constexpr):
    layer = tl.program_id(0)
    at = tl.program_id(1) * COUNTED + tl.arange(0, COUNTED)
    expert = tl.load(routes_LN + layer.to(tl.int64) * N + at, mask=at < N, other=-1)
    chosen = tl.histogram(tl.maximum(expert, 0), BINS, mask=expert >= 0)
    bins = tl.arange(0, BINS)
    to = counts + tl.load(starts_L + layer) + bins
    tl.atomic_add(to, chosen.to(tl.int64), mask=bins < experts)


def count(routes_LTK: torch.Tensor, starts_L: torch.Tensor, counts: torch.Tensor, experts: int) -> None:
    """Add to `counts` (int64), from each layer's start on, how often each expert was chosen; -1 is no choice."""
    N = routes_LTK[0].numel()
    count_kernel[(len(routes_LTK), triton.cdiv(N, COUNTED))](
        routes_LTK,
        starts_L,
        counts,
        N,
        experts,
        COUNTED=COUNTED,
        BINS=max(32, triton.next_power_of_2(experts)),
        num_warps=4,
    )
