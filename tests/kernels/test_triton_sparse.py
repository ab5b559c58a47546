"""Sparse attention (DSA) in the engine's graphed steps, in Triton's interpreter.

pytest tests/kernels/test_triton_sparse.py
"""

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels import reference
from moesaic.kernels.cuda import fast
from moesaic.kernels.cuda import invariant as cuda_invariant
from moesaic.kernels.cuda.fused_forward import outside
from moesaic.kernels.token_selection import best_tokens
from moesaic.kernels.triton.attention import choose as choosing
from moesaic.kernels.triton.attention.choose import choose
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.sample import logprobs_of
from moesaic.model.layout import Layout
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.gpu.overlap import OverlapLoop, step_weights
from tests.kernels import interpreter
from tests.kernels.answers import prompts, same
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


@pytest.mark.parametrize(
    ("scratch", "most", "part"), [(1 << 20, 32768, 4096), (20 * 4 * 64, 32768, 4096), (1 << 20, 32, 8)]
)
def test_the_choice_is_that_of_the_reference(monkeypatch, scratch, most, part):
    """Two sequences in pages that lie anywhere, equal scores among theirs, in one piece and in several; rows of more
    scores than stay in registers."""
    for name, value in {"SCRATCH": scratch, "MOST": most, "PART": part}.items():
        monkeypatch.setattr(choosing, name, value)
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
    """Prompts in pieces, no longer than what is chosen, under a mask and gathered, beside others and read before."""
    assert outside(step_weights(model)) is None
    plain = Engine(model, page_size=4)
    asked = prompts(3, 27)
    wanted = plain.generate(asked, max_tokens=3, temperature=0.0)
    queued = queued_engine(model, policy=Chunked(tokens=12))
    same(queued.generate(asked, max_tokens=3, temperature=0.0), wanted)
    shapes = set(queued.runner.steps.graphs)
    assert any(shape.choosing for shape in shapes) and any(shape.rounds and shape.index_tiles for shape in shapes)
    assert any(shape.decode_only for shape in shapes)
    (again,) = queued.generate(asked[1:], max_tokens=3, temperature=0.0)
    assert again.cached_tokens >= 24
    same([again], wanted[1:])


def test_operations_over_a_cache_while_a_longer_sequence_rests(model):
    """Layer by layer, with the same kernels: against one forward without a cache."""
    (tokens,) = prompts(19)
    tokens_T = torch.tensor(tokens)
    with torch.no_grad():
        wanted_TD = model(tokens_T, Layout([19]), ops=reference)
        cache, pages = model.new_cache(12, 4), [[3, 1, 5, 0, 2], [4, 6, 7, 8]]
        first = Layout([14, 13], cached=[0, 0], cache=cache, pages=pages)
        both_TD = model(torch.cat([tokens_T[:14], tokens_T[:13]]), first, ops=fast)
        rest = Layout([5, 0], cached=[14, 13], cache=cache, pages=pages)
        found_TD = torch.cat([both_TD[:14], model(tokens_T[14:], rest, ops=fast)])
    torch.testing.assert_close(found_TD, wanted_TD, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both_TD[14:], wanted_TD[:13], rtol=1e-4, atol=1e-4)


def test_the_trainer_finds_the_bits_that_were_recorded():
    """In invariant mode, in which prompts are read as completions are written; gradients are those of plain kernels."""
    model = sparse_model("deepseek_v32", topk=4)
    model.mode = "invariant"
    queued = queued_engine(model, policy=Chunked(tokens=8))
    asked = prompts(11, 3)
    params = {"max_tokens": 3, "temperature": 0.7, "record_draws": True, "ignore_eos": True}
    answers = queued.generate(asked, **params, seed=3)
    assert not queued.runner.steps.tiling.prompt_rows and not queued.page_pool.prompts_only
    whole = [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]
    tokens_T, layout = torch.tensor([token for tokens in whole for token in tokens]), Layout([14, 6])
    with torch.enable_grad():
        hidden_TD = model(tokens_T, layout, ops=cuda_invariant)
        hidden_TD.square().sum().backward()
        named = [(name, each) for name, each in model.named_parameters() if each.grad is not None]
        found = {name: each.grad.clone() for name, each in named}
        model.zero_grad()
        model(tokens_T, layout, ops=reference).square().sum().backward()
    logits_TV = cuda_invariant.linear(hidden_TD.detach(), model.output.detach())
    found_T = logprobs_of(logits_TV, tokens_T.roll(-1), 0.7)
    for first, answer in zip((10, 14 + 2), answers, strict=True):
        assert found_T[first : first + 3].tolist() == [entry.drawn for entry in answer.logprobs]
    for name, each in named:
        torch.testing.assert_close(found[name], each.grad, rtol=1e-3, atol=1e-3)
