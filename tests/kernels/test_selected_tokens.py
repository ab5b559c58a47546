"""DSA in native code: what an indexer selects, and attention to what was selected."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import cpu, latent_attention, native
from moesaic.kernels.interface import Mask, mask_of
from moesaic.kernels.token_selection import best_tokens, index_scores
from moesaic.model.config import Dense, Indexer, Latent, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

OPS = native.kernels()
pytestmark = pytest.mark.skipif(OPS is None, reason="no compiler")
SIZES = [(40, 40, 4, 16, 8), (130, 300, 5, 32, 70), (3, 500, 3, 24, 64), (1, 90, 1, 7, 5), (100, 100, 2, 8, 99)]
SPARSE = ModelConfig(
    family="glm_moe_dsa",
    vocab=60,
    hidden=32,
    attention=Latent(5, kv_rank=20, plain_size=12, rope_size=4, value_size=12, q_rank=16, indexer=Indexer(5, 16, 70)),
    rope=Rope(4, interleaved=True),
    layers=tuple(Layer(Dense(48), index=kind) for kind in ("full", "shared", "full")),
    context=256,
    init_std=0.3,
)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("new", "total", "heads", "size", "topk"), SIZES)
def test_selection_is_that_of_the_reference(new: int, total: int, heads: int, size: int, topk: int) -> None:
    q, k, w = drawn(new, heads, size), drawn(total, size, seed=1), drawn(new, heads, seed=2)
    position = torch.arange(total - new, total)
    found, expected = (select(q, k, w, position, topk) for select in (OPS.best_tokens, best_tokens))
    assert torch.equal(found, expected)  # random scores lie further apart than rounding
    alone = [
        OPS.best_tokens(q[t : t + 1], k[: total - new + t + 1], w[t : t + 1], position[t : t + 1], topk)
        for t in range(new)
    ]
    assert torch.equal(torch.cat(alone), found)


def test_ties_go_to_the_earliest_token() -> None:
    """Rectified scores tie at zero, of either sign of weight."""
    q, w = torch.ones(6, 2, 4), torch.tensor([1.0, -0.5]).expand(6, 2)
    k = torch.zeros(50, 4)
    k[[20, 30]] = 1.0
    k[[3, 25]] = -1.0  # rectified to zero too
    found = OPS.best_tokens(q, k, w, torch.arange(44, 50), 5)
    assert found.tolist() == [[0, 1, 2, 20, 30]] * 6


def test_the_best_scores_are_kept() -> None:
    q, k, w = drawn(20, 3, 8), drawn(400, 8, seed=1), drawn(20, 3, seed=2)
    keep_TM = mask_of(OPS.best_tokens(q, k, w, torch.arange(380, 400), 50), 400)
    scores_TM = index_scores(q, k, w)
    least = scores_TM.masked_fill(~keep_TM, float("inf")).amin(-1)
    seen = torch.arange(400) <= torch.arange(380, 400)[:, None]
    assert (scores_TM.masked_fill(keep_TM | ~seen, float("-inf")).amax(-1) <= least + 1e-5).all()


@pytest.mark.parametrize(("new", "total", "heads", "size", "topk"), SIZES)
@pytest.mark.parametrize("latents", [False, True])
def test_attention_to_chosen_tokens(new: int, total: int, heads: int, size: int, topk: int, latents: bool) -> None:
    kv_heads, values = (1, size - 3) if latents else (heads, 13)
    q, k = drawn(new, heads, size), drawn(total, kv_heads, size, seed=1)
    v = k[..., :values] if latents else drawn(total, kv_heads, values, seed=2)
    position = torch.arange(total - new, total)
    chosen = OPS.best_tokens(drawn(new, 2, 8), drawn(total, 8), drawn(new, 2), position, topk)
    mask = Mask(0.3, chosen_TK=chosen)
    found = OPS.attention(q, k, v, mask)
    torch.testing.assert_close(found, cpu.attention(q, k, v, mask), rtol=1e-4, atol=1e-5)
    alone = [OPS.attention(q[t : t + 1], k, v, Mask(0.3, chosen_TK=chosen[t : t + 1])) for t in range(new)]
    assert torch.equal(torch.cat(alone), found)


def test_whoever_chose_all_has_the_bits_of_dense_attention() -> None:
    q, k, v = drawn(90, 3, 20), drawn(150, 3, 20, seed=1), drawn(150, 3, 9, seed=2)
    places = torch.arange(150).expand(90, 150)
    chosen = torch.where(places <= torch.arange(60, 150)[:, None], places, -1).int().contiguous()
    assert torch.equal(OPS.attention(q, k, v, Mask(0.3, chosen_TK=chosen)), OPS.attention(q, k, v, Mask(0.3)))


@pytest.mark.parametrize("mode", ["fast", "invariant"])
def test_a_model_gives_the_same_however_a_sequence_is_split(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit in invariant mode, alone and in a batch, with and without a cache, learning or not."""
    monkeypatch.setattr(latent_attention, "FOLDED", 32)
    model = Model(SPARSE, mode=mode).initialize(0)
    tokens = torch.randint(60, (150,), generator=torch.Generator().manual_seed(0))
    whole = model(tokens, Layout([150]))
    reference = Model(SPARSE, mode="reference").initialize(0)(tokens, Layout([150]))
    torch.testing.assert_close(whole, reference, rtol=1e-3, atol=1e-3)
    cache, done, pieces = model.new_cache(20), 0, []
    for new in (60, 40, 1, 1, 47, 1):  # the selection begins within the second
        layout = Layout([new], cached=[done], cache=cache, pages=[list(range(5, 15))])
        pieces.append(model(tokens[done : done + new], layout))
        done += new
    beside = model(torch.cat([tokens[:77], tokens]), Layout([77, 150]))[77:]
    for other in (torch.cat(pieces), beside):
        torch.testing.assert_close(other, whole, rtol=1e-4, atol=1e-4)
        assert mode == "fast" or torch.equal(other, whole)
    if mode == "invariant":
        with torch.enable_grad():
            learning = model(tokens, Layout([150]))
        assert learning.requires_grad and torch.equal(learning, whole)


def test_long_prompts_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a query does not look at is not fetched, nor is a mask made of it."""
    monkeypatch.setattr(cpu, "attention", None)
    monkeypatch.setattr("moesaic.kernels.interface.mask_of", None)
    Model(SPARSE).initialize(0)(torch.arange(150) % 60, Layout([150]))
