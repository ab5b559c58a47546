"""From logits to the loss of each row, and in their place the gradient: two passes, the second from the cache."""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def loss_kernel(logits_TV, targets_T, losses_T, V, IGNORED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits = logits_TV + row.to(tl.int64) * V
    target = tl.load(targets_T + row)
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for base in tl.range(0, V, BLOCK, num_stages=3):
        x = tl.load(logits + base + column, mask=column < V - base, other=float("-inf")).to(tl.float32)
        top = tl.maximum(best, x)
        # A lane that has seen no column yet has nothing to shrink.
        total = total * tl.where(best == top, 1.0, tl.exp(best - top)) + tl.where(
            x > float("-inf"), tl.exp(x - top), 0.0
        )
        best = top
    highest = tl.max(best, 0)
    total = tl.sum(tl.where(best > float("-inf"), total * tl.exp(best - highest), 0.0), 0)
    whole = highest + tl.log(total)
    chosen = tl.load(logits + tl.maximum(target, 0)).to(tl.float32)
    tl.store(losses_T + row, tl.where(target == IGNORED, 0.0, whole - chosen))
    if GRADIENT:
        tl.debug_barrier()  # the target's logit has been read before it is overwritten
        for base in tl.range(0, V, BLOCK, num_stages=3):
            inside = column < V - base
            x = tl.load(logits + base + column, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - whole) - tl.where(base + column == target, 1.0, 0.0)
            tl.store(logits + base + column, gradient.to(logits_TV.dtype.element_ty), mask=inside)


def softmax_loss(logits_TV: Tensor, targets_T: Tensor, ignored: int, gradient: bool) -> Tensor:
    """-log p(target) of each row, zero where ignored. With `gradient`, `logits_TV` becomes that of the loss as if every
    row counted one; rows to be ignored are for the caller to leave out."""
    T, V = logits_TV.shape
    assert logits_TV.is_contiguous()
    losses_T = torch.empty(T, dtype=torch.float32, device=logits_TV.device)
    if T:
        loss_kernel[(T,)](
            logits_TV, targets_T, losses_T, V, IGNORED=ignored, GRADIENT=gradient,
            BLOCK=min(BLOCK, triton.next_power_of_2(V)), num_warps=8,
        )  # fmt: skip
    return losses_T
