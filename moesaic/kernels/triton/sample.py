"""Choose each sequence's next token on the device: the best one, or one drawn by adding Gumbel noise to the logits.

The noise depends on a sequence's seed and place alone, so that a draw is the same alone and in any batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moesaic.kernels.triton.overlap import launch_overlapped, overlaps

CHUNK = 1024


@triton.jit
def scan_kernel(
    logits_SV,
    temperatures_S,
    seeds_S,
    places_S,
    best_SX,
    token_SX,
    top_SX,
    sum_SX,
    V,
    X,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A chunk of the vocabulary: its best token, and the parts of the logarithm of the sum of all."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logits = tl.load(logits_SV + row.to(tl.int64) * V + token, mask=token < V, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, 0)
    at = row * X + chunk
    tl.store(top_SX + at, top)
    tl.store(sum_SX + at, tl.sum(tl.exp(logits - top), 0))
    temperature = tl.load(temperatures_S + row)
    score = logits
    if temperature > 0:
        seed = tl.load(seeds_S + row)
        place = tl.load(places_S + row)
        bits, _, _, _ = tl.philox(seed, token, token * 0 + place, token * 0, token * 0)
        uniform = ((bits >> 8).to(tl.float32) + 0.5) * (1.0 / 16777216.0)
        score = logits / temperature - tl.log(-tl.log(uniform))
    best = tl.max(score, 0)
    tl.store(best_SX + at, best)
    tl.store(token_SX + at, tl.min(tl.where(score == best, token, V - 1), 0))


@triton.jit
def choose_kernel(
    logits_SV,
    best_SX,
    token_SX,
    top_SX,
    sum_SX,
    tokens_S,
    places_S,
    chosen_S,
    logprobs_S,
    V,
    X,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The best of all chunks. The sequence moves on: its last token and its place are those of the next step."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    at = row * X + chunk
    best = tl.load(best_SX + at, mask=chunk < X, other=float("-inf"))
    token = tl.load(token_SX + at, mask=chunk < X, other=V)
    chosen = tl.min(tl.where(best == tl.max(best, 0), token, V - 1), 0)
    top = tl.load(top_SX + at, mask=chunk < X, other=float("-inf"))
    whole = tl.max(top, 0)
    total = tl.sum(tl.load(sum_SX + at, mask=chunk < X, other=0.0) * tl.exp(top - whole), 0)
    logit = tl.load(logits_SV + row.to(tl.int64) * V + chosen).to(tl.float32)
    tl.store(logprobs_S + row, logit - whole - tl.log(total))
    tl.store(chosen_S + row, chosen)
    place = tl.load(places_S + row)
    tl.store(tokens_S + row, chosen, mask=place >= 0)
    tl.store(places_S + row, tl.where(place >= 0, place + 1, place))


def sample(
    logits_SV: torch.Tensor,
    temperatures_S: torch.Tensor,
    seeds_S: torch.Tensor,
    tokens_S: torch.Tensor,
    places_S: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen tokens int32, their log-probabilities at temperature one); `tokens_S` and `places_S` move on by one."""
    S, V = logits_SV.shape
    X = triton.cdiv(V, CHUNK)
    device = logits_SV.device
    parts_3SX = torch.empty(3, S, X, dtype=torch.float32, device=device)
    token_SX = torch.empty(S, X, dtype=torch.int32, device=device)
    chosen_S = torch.empty(S, dtype=torch.int32, device=device)
    logprobs_S = torch.empty(S, dtype=torch.float32, device=device)
    overlap = overlaps(device)
    launch_overlapped(
        scan_kernel,
        (S, X),
        logits_SV,
        temperatures_S,
        seeds_S,
        places_S,
        parts_3SX[0],
        token_SX,
        parts_3SX[1],
        parts_3SX[2],
        V,
        X,
        CHUNK=CHUNK,
        OVERLAP=overlap,
        num_warps=4,
    )
    launch_overlapped(
        choose_kernel,
        (S,),
        logits_SV,
        parts_3SX[0],
        token_SX,
        parts_3SX[1],
        parts_3SX[2],
        tokens_S,
        places_S,
        chosen_S,
        logprobs_S,
        V,
        X,
        CHUNKS=triton.next_power_of_2(X),
        OVERLAP=overlap,
        num_warps=4,
    )
    return chosen_S, logprobs_S
