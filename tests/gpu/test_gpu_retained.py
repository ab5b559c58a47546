"""KV policies on a real GPU: decode steps as CUDA graphs write what plain forwards write, and nothing is lost.

pytest tests/gpu/test_gpu_retained.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Runner
from moesaic.serve.core.kv_policies.h2o import H2O
from moesaic.serve.core.kv_policies.kvmerger import KVMerger
from moesaic.serve.core.kv_policies.quantized import Quantized
from moesaic.serve.core.kv_policies.sinks import Sinks
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from moesaic.serve.gpu.retained import RetainedLoop
from tests.gpu.models import tokens_of


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize(
    "policy",
    [SnapKV(share=0.25), KVMerger(share=0.5), Sinks(share=0.5, every=16)],
    ids=lambda policy: type(policy).__name__,
)
def test_graphs_write_what_plain_forwards_write(directories, exact_float32, name, policy):
    model = moesaic.load(directories[name], dtype=torch.float32, device="cuda")
    graphed, plain = (Engine(model, kv_policy=policy, cache_bytes=1 << 27) for _ in range(2))
    assert isinstance(graphed.runner, RetainedLoop)
    plain.runner = Runner(plain)
    prompts = tokens_of(700, 90, 333)
    found, wanted = (engine.generate(prompts, max_tokens=40, temperature=0.0) for engine in (graphed, plain))
    assert graphed.runner.steps.graphs, "steps of decoding requests are graphs"
    for given, expected in zip(found, wanted, strict=True):
        assert given.tokens == expected.tokens
        pairs = zip(given.logprobs, expected.logprobs, strict=True)
        assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 2e-3
    assert graphed.page_pool.in_use == 0


def test_in_bfloat16_requests_come_and_go(directories):
    model = moesaic.load(directories["qwen3_moe"], dtype=torch.bfloat16, device="cuda")
    engine = Engine(model, kv_policy=SnapKV(share=0.25), cache_bytes=1 << 27, max_requests=3)
    answers = engine.generate(tokens_of(*range(60, 600, 60)), max_tokens=33, temperature=0.7)
    assert all(len(answer.tokens) == 33 for answer in answers)
    assert engine.page_pool.in_use == 0


def test_what_graphs_do_not_know_runs_layer_by_layer(directories):
    model = moesaic.load(directories["qwen3_moe"], dtype=torch.bfloat16, device="cuda")
    assert not isinstance(Engine(model, kv_policy=Quantized(bits=8)).runner, RetainedLoop)
    engine = Engine(model, kv_policy=H2O(share=0.5), cache_bytes=1 << 27)
    assert len(engine.generate(tokens_of(200), max_tokens=8, temperature=0.0)[0].tokens) == 8
    assert not engine.runner.steps.graphs
