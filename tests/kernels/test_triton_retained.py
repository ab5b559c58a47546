"""Decode steps of compact requests in Triton's interpreter: what heads have retained, and what plain forwards write.

pytest tests/kernels/test_triton_retained.py
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.cuda.retained_step import padded, rounded
from moesaic.kernels.triton.attention.retained_rows import gather, store
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies.fastgen import FastGen
from moesaic.serve.core.kv_policies.h2o import H2O
from moesaic.serve.core.kv_policies.kvmerger import KVMerger
from moesaic.serve.core.kv_policies.quantized import Quantized
from moesaic.serve.core.kv_policies.sinks import Sinks
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from moesaic.serve.core.request import Sampling
from moesaic.serve.gpu.retained import RetainedLoop
from tests.kernels import interpreter
from tests.kernels.answers import prompts, same
from tests.serve.tiny import tiny_model

interpreter.require()


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=2)


def engines(model, policy, **options):
    graphed, plain = (Engine(model, kv_policy=policy, page_size=4, **options) for _ in range(2))
    assert RetainedLoop.outside(graphed) is None
    graphed.runner = RetainedLoop(graphed)
    graphed.page_pool.store.writes_ahead = True  # as on a GPU
    return graphed, plain


@pytest.mark.parametrize(
    "policy",
    [
        SnapKV(share=0.25, least=6, window=4),
        KVMerger(share=0.5, least=6),
        Sinks(share=0.5, least=8, every=3),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_answers_are_those_of_plain_forwards(model, policy):
    graphed, plain = engines(model, policy)
    asked = prompts(40, 9, 23)
    options = {"max_tokens": 8, "temperature": 0.0}
    same(*(engine.generate(asked, **options) for engine in (graphed, plain)))
    assert graphed.runner.steps.graphs, "steps of decoding requests went through it"
    assert graphed.experts.by_layer() == plain.experts.by_layer(), "tokens that are none choose no experts"


def test_drawn_answers_and_requests_that_come_and_go(model):
    graphed, plain = engines(model, SnapKV(share=0.5, least=6, window=4), seed=3)
    found = []
    for engine in (graphed, plain):
        requests = [
            engine.request(prompt, Sampling(max_tokens=3 + 2 * number, temperature=0.7, seed=number, ignore_eos=True))
            for number, prompt in enumerate(prompts(20, 31, 12))
        ]
        engine.add(requests[0])
        for step in range(60):
            engine.step()
            if step in (1, 3):
                engine.add(requests[1 + step // 2])
        found.append([request.tokens for request in requests])
        assert all(request.finish_reason == "length" for request in requests)
    assert found[0] == found[1]


def test_scores_of_generated_tokens_and_quantized_rows_stay_with_plain_forwards(model):
    for policy in (H2O(share=0.5, least=8), FastGen(share=0.5, least=8)):
        graphed, plain = engines(model, policy)
        asked = prompts(24)
        same(*(engine.generate(asked, max_tokens=4, temperature=0.0) for engine in (graphed, plain)))
        assert not graphed.runner.steps.graphs
    assert RetainedLoop.outside(Engine(model, kv_policy=Quantized(bits=8))) == "quantized rows"
    assert RetainedLoop.outside(Engine(model)) == "no KV cache policy"


def test_rows_are_gathered_and_the_newest_are_written():
    layers, heads, most = 2, 3, 7
    tables = [torch.randperm(90)[: layers * heads * width].int().view(layers, heads, width) for width in (9, 5)]
    used = (8, 4)
    counts_TLN = torch.tensor([[[3, 7, 1], [2, 0, 5]], [[4, 4, 4], [1, 2, 3]], [[0] * 3] * 2], dtype=torch.int32)
    given = [[table.data_ptr(), table.shape[-1], columns] for table, columns in zip(tables, used, strict=True)]
    tables_T3 = torch.from_numpy(np.array([*given, given[0]], np.int64))
    chosen_LXK, positions_LX, newest_LX = gather(tables_T3, counts_TLN, most)
    for token, (table, columns) in enumerate(zip(tables, used, strict=True)):
        for layer in range(layers):
            for head in range(heads):
                count, pair = int(counts_TLN[token, layer, head]), token * heads + head
                own = table[layer, head, columns - count : columns]
                assert torch.equal(chosen_LXK[layer, pair, :count], own)
                assert positions_LX[layer, pair] == count - 1
                assert newest_LX[layer, pair] == (own[-1] if count else -1)
    assert (newest_LX[:, 2 * heads :] == -1).all()
    keys_XC, values_XC = torch.zeros(2, 90, 16)
    k_TNC, v_TNC = torch.randn(2, 3, heads, 16)
    store(k_TNC, v_TNC, newest_LX[0], keys_XC, values_XC)
    for pair, row in enumerate(newest_LX[0].tolist()):
        if row >= 0:
            assert torch.equal(keys_XC[row], k_TNC.flatten(0, 1)[pair])
            assert torch.equal(values_XC[row], v_TNC.flatten(0, 1)[pair])
    assert int(keys_XC.any(1).sum()) == 6, "nothing else is written"


def test_sizes_of_graphs():
    assert [padded(count) for count in (1, 2, 3, 5, 8, 9, 40, 65)] == [1, 2, 4, 8, 8, 16, 40, 96]
    assert [rounded(rows) for rows in (1, 512, 513, 4097, 5000)] == [512, 512, 1024, 5120, 5120]
