"""Sparse attention (DSA) in the engine's graphed steps, in Triton's interpreter.

pytest tests/kernels/test_triton_sparse.py
"""

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.cuda.fused_forward import outside
from moesaic.kernels.token_selection import best_tokens
from moesaic.kernels.triton.attention import choose as choosing
from moesaic.kernels.triton.attention.choose import choose
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.gpu.overlap import OverlapLoop, step_weights
from tests.kernels import interpreter
from tests.random_models import small_config
from tests.serve.tiny import VOCABULARY, loaded

interpreter.require()


def sparse_model(family="glm_moe_dsa", topk=5, **more):
    """Layers with an indexer of their own, and one that attends to what another chose (IndexCache)."""
    config = small_config(
        family, VOCABULARY, hidden=32, ffn=32, layers=2, heads=(6, 6),
        q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10,
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        first_k_dense_replace=1, n_group=1, topk_group=1, num_nextn_predict_layers=0,
        index_n_heads=3, index_head_dim=16, index_topk=topk, max_position_embeddings=256, initializer_range=0.3, **more,
    )  # fmt: skip
    return loaded(config, seed=1)


@pytest.fixture(scope="module")
def model():
    made = sparse_model(indexer_types=["full", "shared"], mlp_layer_types=["dense", "sparse"])
    assert [layer.attention.indexer is not None for layer in step_weights(made).layers] == [True, False]
    return made


def queued_engine(model, **options):
    engine = Engine(model, page_size=4, **options)
    assert OverlapLoop.outside(engine) is None
    engine.runner = OverlapLoop(engine)
    return engine


def prompts(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def same(given, wanted):
    for one, other in zip(given, wanted, strict=True):
        assert one.tokens == other.tokens
        found, expected = ([entry.logprob for entry in answer.logprobs] for answer in (one, other))
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("scratch", [1 << 20, 20 * 4 * 64])
def test_the_choice_is_that_of_the_reference(monkeypatch, scratch):
    """Two sequences in pages that lie anywhere, equal scores among theirs, in one piece and in several."""
    monkeypatch.setattr(choosing, "SCRATCH", scratch)
    torch.manual_seed(0)
    lengths, page_size, H, C, topk = (50, 23), 4, 3, 16, 10
    spans = [slice(0, 50), slice(50, 73)]
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    sequences_T = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    table_SP = torch.randperm(40)[:26].view(2, 13)
    slots_T = table_SP[sequences_T, positions_T // page_size] * page_size + positions_T % page_size
    q, k, weights = torch.randn(73, H, C), torch.randn(73, C), torch.randn(73, H)
    k[[30, 31, 40]] = k[3].clone()
    keys = torch.zeros(40, page_size, C)
    keys.view(-1, C)[slots_T] = k
    tiles = [(at, min(8, span.stop - at)) for span in spans for at in range(span.start, span.stop, 8)]
    given = (positions_T.int(), sequences_T.int(), table_SP.int())
    rows = Rows(*given, 64, None, index_X2=torch.tensor(tiles, dtype=torch.int32))
    chosen_TK = choose(q, weights, keys, rows, topk).slots_TK
    for span in spans:
        wanted_TK = best_tokens(q[span], k[span], weights[span] * H**-0.5, positions_T[span], topk)
        for found_K, wanted_K in zip(chosen_TK[span].tolist(), wanted_TK.tolist(), strict=True):
            wanted = [slots_T[span][place].item() for place in wanted_K if place >= 0]
            assert found_K[: len(wanted)] == wanted


def test_answers_are_those_of_plain_passes(model):
    """Prompts in pieces and at once, shorter than what is chosen and longer, side by side and read before."""
    assert outside(step_weights(model)) is None
    plain = Engine(model, page_size=4)
    asked = prompts(3, 11, 27)
    wanted = plain.generate(asked, max_tokens=6, temperature=0.0)
    for tokens in (8, 64):
        queued = queued_engine(model, policy=Chunked(tokens=tokens))
        same(queued.generate(asked, max_tokens=6, temperature=0.0), wanted)
        shapes = set(queued.runner.steps.graphs)
        assert any(shape.choosing for shape in shapes) and any(shape.index_tiles == 0 for shape in shapes)
        (again,) = queued.generate(asked[2:], max_tokens=6, temperature=0.0)
        assert again.cached_tokens >= 16
        same([again], wanted[2:])
