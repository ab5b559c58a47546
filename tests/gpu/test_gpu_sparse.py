"""Kernels of sparse attention (DSA) on a real GPU at the sizes of published models.

pytest tests/gpu/test_gpu_sparse.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

from moesaic.kernels.token_selection import index_scores
from moesaic.kernels.triton.attention import choose as choosing
from moesaic.kernels.triton.attention.choose import choose
from moesaic.kernels.triton.attention.chosen_prompts import attend_chosen
from moesaic.kernels.triton.attention.paged import attend
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.attention.prompt_rows import CHOOSING

DEVICE, SIZE, PAGE = "cuda", 128, 16
pytestmark = pytest.mark.usefixtures("exact_float32")


def ones(count):
    return torch.stack([torch.arange(count), torch.ones(count)], 1).int().to(DEVICE)


@pytest.mark.parametrize("zeros", [False, True], ids=["scores", "ties"])
@pytest.mark.parametrize(
    ("heads", "topk", "lengths", "new"),
    [(64, 2048, (3000, 9000), (900, 40)), (64, 2048, (50000,), (70,)), (32, 64, (700, 1, 300), (700, 1, 300))],
)
def test_the_best_are_chosen(monkeypatch, heads, topk, lengths, new, zeros):
    """As few as fit at a time, alone and beside others; the earliest of those that are equal."""
    torch.manual_seed(0)
    width = -(-max(lengths) // PAGE)
    table_SP = torch.randperm(len(lengths) * width + 3, device=DEVICE)[: len(lengths) * width].view(-1, width).int()
    positions_T = torch.cat([torch.arange(n - k, n) for n, k in zip(lengths, new, strict=True)]).int().to(DEVICE)
    sequences_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(new)).int().to(DEVICE)
    keys = torch.zeros(len(lengths) * width + 3, PAGE, SIZE, device=DEVICE, dtype=torch.bfloat16)
    own = []
    for row_P, length in zip(table_SP.long(), lengths, strict=True):
        k_MC = torch.randn(length, SIZE, device=DEVICE, dtype=torch.bfloat16)
        if zeros:
            k_MC[torch.rand(length, device=DEVICE) < 0.97] = 0
        place_M = torch.arange(length, device=DEVICE)
        keys.view(-1, SIZE)[row_P[place_M // PAGE] * PAGE + place_M % PAGE] = k_MC
        own.append(k_MC)
    T = len(positions_T)
    q = torch.randn(T, heads, SIZE, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.randn(T, heads, device=DEVICE, dtype=torch.bfloat16)
    starts = [sum(new[:number]) for number in range(len(new))]
    tiles = [(at, min(32, s + n - at)) for s, n in zip(starts, new, strict=True) for at in range(s, s + n, 32)]
    where = (positions_T, sequences_T, table_SP)
    rows = Rows(*where, max(lengths), None, index_X2=torch.tensor(tiles, dtype=torch.int32, device=DEVICE))
    found = choose(q, weights, keys, rows, topk, places=True).slots_TK
    counts_T = (positions_T + 1).clamp(max=topk)
    there_TK = torch.arange(topk, device=DEVICE) < counts_T[:, None]
    alone = Rows(*where, max(lengths) + 999, None, index_X2=ones(T))
    monkeypatch.setattr(choosing, "SCRATCH", 8 << 20)
    for other in (alone, rows):
        again = choose(q, weights, keys, other, topk, places=True).slots_TK
        assert torch.equal(again.where(there_TK, -1), found.where(there_TK, -1))
    slots = choose(q, weights, keys, rows, topk).slots_TK
    page_TK = table_SP[sequences_T.long()].gather(1, (found.where(there_TK, 0) // PAGE).long())
    assert torch.equal((page_TK * PAGE + found % PAGE).where(there_TK, -1), slots.where(there_TK, -1))
    for row in range(0, T, max(1, T // 48)):
        length, chosen_K = int(positions_T[row]) + 1, found[row, : counts_T[row]].long()
        assert (chosen_K.diff() > 0).all() and chosen_K[0] >= 0 and chosen_K[-1] < length
        if length > topk:
            k_MC = own[sequences_T[row]][:length]
            scores_M = index_scores(q[row : row + 1], k_MC, weights[row : row + 1].float() * heads**-0.5)[0]
            kept_M = torch.zeros(length, dtype=torch.bool, device=DEVICE).index_fill(0, chosen_K, True)
            least = scores_M[kept_M].min()
            assert scores_M[~kept_M].max() <= least + 1e-5 * scores_M.std()
            tied_M = scores_M == least
            if zeros and (tied_M & kept_M).any() and (tied_M & ~kept_M).any():
                assert (tied_M & kept_M).nonzero().max() < (tied_M & ~kept_M).nonzero().min()


@pytest.mark.parametrize(("heads", "topk"), [(128, 256), (64, 2048), (16, 64), (20, 300)])
def test_attention_to_what_was_chosen(heads, topk):
    """Of prompts and of tiles of one token; those alone and beside others, in decode and in prefill, to the bit."""
    torch.manual_seed(0)
    T, slots = 140, 6400
    latents = torch.randn(slots // PAGE, PAGE, 576, device=DEVICE, dtype=torch.bfloat16)
    q = torch.randn(T, heads, 576, device=DEVICE, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(slots, device=DEVICE)[:topk] for _ in range(T)]).int()
    positions_T = torch.arange(T, device=DEVICE).int() * 30
    kinds_T = torch.full((T,), CHOOSING, dtype=torch.int32, device=DEVICE)
    kinds_T[5], scale = 1, 576**-0.5
    where = (positions_T, positions_T, positions_T[None], 9999)
    prompts = torch.full((T, heads, 512), 7.0, device=DEVICE, dtype=torch.bfloat16)
    attend_chosen(q, latents, chosen, Rows(*where, None, kinds_T=kinds_T), scale, 64, prompts)
    assert (prompts[5] == 7).all()
    decode, prefill, alone = (
        attend(q, latents, latents, rows, scale, rope_size=64, chosen_TK=chosen)
        for rows in (
            Rows(*where, ones(T)),
            Rows(*where, None, prefill_X2=ones(T), prefill_tokens=1),
            Rows(*where, ones(T)[77:78].contiguous()),
        )
    )
    assert torch.equal(decode, prefill) and torch.equal(decode[77], alone[77])
    for row in (0, 3, 30, 77, 139):
        latent_KX = latents.view(slots, 576)[chosen[row, : 30 * row + 1].long()].float()
        wanted = (q[row].float() @ latent_KX.T * scale).softmax(-1) @ latent_KX[:, :512]
        for given in (prompts, decode):
            assert (given[row].float() - wanted).norm() < 0.005 * wanted.norm()


@pytest.mark.parametrize(("heads", "lengths"), [(128, (1, 255, 700, 5000)), (64, (2048, 2049, 9000)), (64, (40000,))])
def test_attention_to_all_latents(heads, lengths):
    """Splits of other sizes for longer contexts: a token has the same bits decoded, in a prompt, and alone."""
    torch.manual_seed(0)
    count, width = len(lengths), -(-max(lengths) // PAGE)
    latents = torch.randn(count * width, PAGE, 576, device=DEVICE, dtype=torch.bfloat16)
    table_SP = torch.randperm(count * width, device=DEVICE).view(count, width).int()
    places = [sorted({0, length // 3, length - 2, length - 1} - {-1}) for length in lengths]
    positions_T = torch.tensor([place for own in places for place in own], dtype=torch.int32, device=DEVICE)
    sequences_T = (
        torch.repeat_interleave(torch.arange(count), torch.tensor([len(own) for own in places])).int().to(DEVICE)
    )
    T, scale = len(positions_T), 576**-0.5
    q = torch.randn(T, heads, 576, device=DEVICE, dtype=torch.bfloat16)
    where = (positions_T, sequences_T, table_SP)
    decode, longer, prompts, alone = (
        attend(q, latents, latents, rows, scale, rope_size=64)
        for rows in (
            Rows(*where, max(lengths), ones(T)),
            Rows(*where, 4 * max(lengths), ones(T)),
            Rows(*where, 1, None, prefill_X2=ones(T), prefill_tokens=1),
            Rows(*where, max(lengths), ones(T)[T - 1 :].contiguous()),
        )
    )
    assert torch.equal(decode, prompts) and torch.equal(decode, longer) and torch.equal(decode[-1], alone[-1])
    for row in range(T):
        slots = table_SP[sequences_T[row]].long()[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)
        latent_KX = latents.view(-1, 576)[slots.flatten()[: positions_T[row] + 1]].float()
        wanted = (q[row].float() @ latent_KX.T * scale).softmax(-1) @ latent_KX[:, :512]
        assert (decode[row].float() - wanted).norm() < 0.005 * wanted.norm()
