"""Choose each sequence's next token on the device: the likeliest one, or the one at a given share of the distribution.
A trainer asks the same kernels how likely a given token is, and gets the same bits.

The share (a number in [0, 1) for each row) is drawn by the caller (`serve/core/sampler.py`), so that a draw is the
same alone, in any batch, and on the host. The vocabulary is walked in chunks: each gives its largest logit and its
sums, a second kernel finds the chunk in which the share falls, and in it the token.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.dependent_launch import launch_pdl, supports_pdl

CHUNK = 1024


@triton.jit
def scan_kernel(
    logits_RV,
    temperatures_R,
    token_RX,
    top_RX,
    sum_RX,
    warm_RX,
    V,
    X,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A chunk of the vocabulary: its best token, its sum of probabilities, and the same at the row's temperature."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_RV + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, 0)
    at = row * X + chunk
    tl.store(top_RX + at, top)
    tl.store(token_RX + at, tl.min(tl.where(logits == top, token, V - 1), 0))
    tl.store(sum_RX + at, tl.sum(tl.exp(logits - top), 0))
    temperature = tl.load(temperatures_R + row)
    if temperature > 0:
        tl.store(warm_RX + at, tl.sum(tl.exp((logits - top) / temperature), 0))


@triton.jit
def sample_kernel(
    logits_RV,
    temperatures_R,
    draws_R,
    given_R,
    slots_R,
    token_RX,
    top_RX,
    sum_RX,
    warm_RX,
    sampled_S,
    out_R,
    logprobs_R,
    drawn_R,
    V,
    X,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of the whole vocabulary; where its sequence has a slot, that is the next step's input."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    temperature = tl.load(temperatures_R + row)
    chunk = tl.arange(0, CHUNKS)
    at = row * X + chunk
    top = tl.load(top_RX + at, mask=chunk < X, other=float("-inf"))
    whole = tl.max(top, 0)
    total = tl.sum(tl.load(sum_RX + at, mask=chunk < X, other=0.0) * tl.exp(top - whole), 0)
    logits_V = logits_RV + row.to(tl.int64) * V
    warm = tl.zeros([CHUNKS], tl.float32)
    if temperature > 0:
        warm = tl.load(warm_RX + at, mask=chunk < X, other=0.0) * tl.exp((top - whole) / temperature)
    if given_R is not None:
        chosen = tl.load(given_R + row).to(tl.int32)
    else:
        chosen = tl.min(tl.where(top == whole, tl.load(token_RX + at, mask=chunk < X, other=V - 1), V - 1), 0)
        if temperature > 0:
            below = tl.cumsum(warm.to(tl.float64), 0)
            target = tl.load(draws_R + row).to(tl.float64) * tl.max(below, 0)
            # The first chunk that reaches beyond the share; rounding may leave none, then the last that has anything.
            last = tl.max(tl.where(warm > 0, chunk, 0), 0)
            mine = tl.minimum(tl.min(tl.where(below > target, chunk, CHUNKS), 0), last)
            rest = target - tl.sum(tl.where(chunk == mine, below - warm.to(tl.float64), 0.0), 0)
            token = mine * CHUNK + tl.arange(0, CHUNK)
            logits = tl.load(logits_V + token, mask=token < V, other=float("-inf")).to(tl.float32)
            inner = tl.exp((logits - whole) / temperature)
            reached = tl.cumsum(inner.to(tl.float64), 0) > rest
            furthest = tl.max(tl.where(inner > 0, token, 0), 0)
            chosen = tl.minimum(tl.min(tl.where(reached, token, V), 0), furthest)
    logit = tl.load(logits_V + chosen).to(tl.float32)
    tl.store(logprobs_R + row, logit - whole - tl.log(total))
    if (temperature > 0) & (temperature != 1):
        tl.store(drawn_R + row, tl.div_rn(logit - whole, temperature) - tl.log(tl.sum(warm, 0)))
    else:
        tl.store(drawn_R + row, logit - whole - tl.log(total))
    if sampled_S is not None:
        slot = tl.load(slots_R + row)
        tl.store(out_R + row, chosen)
        tl.store(sampled_S + slot, chosen, mask=slot >= 0)


def sample(
    logits_RV: torch.Tensor,
    temperatures_R: torch.Tensor,
    draws_R: torch.Tensor,
    slots_R: torch.Tensor,
    sampled_S: torch.Tensor,
) -> torch.Tensor:
    """(3, R) int32: the chosen tokens, and the bits of their float32 log-probabilities, at temperature one and at the
    row's. A token also goes to its row's slot of `chosen_S`, where that is not negative. Temperature zero takes the
    likeliest token."""
    out_3R = torch.empty(3, len(logits_RV), dtype=torch.int32, device=logits_RV.device)
    _run(logits_RV, temperatures_R, draws_R, None, slots_R, sampled_S, out_3R)
    return out_3R


def logprobs_of(logits_RV: torch.Tensor, tokens_R: torch.Tensor, temperature: float) -> torch.Tensor:
    """(R,) float32: how likely each row's token is, to the bit what `sample` says of a token it chose."""
    R = len(logits_RV)
    out_3R = torch.empty(3, R, dtype=torch.int32, device=logits_RV.device)
    temperatures_R = torch.full((R,), temperature, device=logits_RV.device)
    if R:
        _run(logits_RV.contiguous(), temperatures_R, None, tokens_R.contiguous(), None, None, out_3R)
    return out_3R[2].view(torch.float32)


def _run(logits_RV, temperatures_R, draws_R, given_R, slots_R, sampled_S, out_3R: torch.Tensor) -> None:
    R, V = logits_RV.shape
    X = triton.cdiv(V, CHUNK)
    device = logits_RV.device
    parts_3RX = torch.empty(3, R, X, dtype=torch.float32, device=device)
    token_RX = torch.empty(R, X, dtype=torch.int32, device=device)
    overlap = supports_pdl(device)
    launch_pdl(
        scan_kernel,
        (R, X),
        logits_RV,
        temperatures_R,
        token_RX,
        parts_3RX[0],
        parts_3RX[1],
        parts_3RX[2],
        V,
        X,
        CHUNK=CHUNK,
        PDL=overlap,
        num_warps=4,
    )
    launch_pdl(
        sample_kernel,
        (R,),
        logits_RV,
        temperatures_R,
        draws_R,
        given_R,
        slots_R,
        token_RX,
        parts_3RX[0],
        parts_3RX[1],
        parts_3RX[2],
        sampled_S,
        out_3R[0],
        out_3R[1].view(torch.float32),
        out_3R[2].view(torch.float32),
        V,
        X,
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(X),
        PDL=overlap,
        num_warps=4,
    )
