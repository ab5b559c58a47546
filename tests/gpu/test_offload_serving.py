"""Offloaded experts and layers on a GPU: from pinned host memory and from disk, with the bits of all on the GPU.

pytest tests/gpu/test_offload_serving.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.serve.core.engine import Engine
from moesaic.serve.gpu.overlap import OverlapLoop
from moesaic.serve.offload.loading import load_served
from tests.gpu.models import tokens_of

EXPERTS = {"qwen3_moe": (2, 16, 256, 512), "deepseek_v3": (2, 32, 256, 512)}  # layers, experts, F, D


def answers(model, graphs=False):
    engine = Engine(model, cache_bytes=1 << 26, max_requests=8, seed=1)
    assert isinstance(engine.runner, OverlapLoop) == graphs
    out = []
    for prompts in ([[5, 6, 7]], tokens_of(70, 3, 200, 31), tokens_of(1, 1)):
        for options in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
            done = engine.generate(prompts, max_tokens=12, **options)
            out += [(list(one.tokens), [entry.logprob for entry in one.logprobs]) for one in done]
    return out


def offloaded(directory, **options):
    return load_served(directory, device="cuda", dtype="bfloat16", **options)


@pytest.fixture(scope="module")
def whole(directories):
    """Answers with all weights on the GPU, layer by layer as offloaded ones are."""
    made = {}

    def of(name):
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(OverlapLoop, "outside", staticmethod(lambda engine: "this test"))
                made[name] = answers(moesaic.load(directories[name], device="cuda", dtype="bfloat16"))
        return made[name]

    return of


def test_graphed_steps_have_the_same_bits(directories, whole):
    model = moesaic.load(directories["qwen3_moe"], device="cuda", dtype="bfloat16")
    assert answers(model, graphs=True) == whole("qwen3_moe")


@pytest.mark.parametrize("name", sorted(EXPERTS))
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_experts_have_the_bits_of_all_on_the_gpu(directories, whole, name, share):
    layers, count, width, hidden = EXPERTS[name]
    budget = int(share * layers * count * 3 * width * hidden * 2)
    model = offloaded(directories[name], offload="experts", expert_cache_bytes=budget)
    assert answers(model) == whole(name)
    assert (model.ops.counts.misses > 0) == (share < 1)
    assert all(tensor.is_pinned() for layer in model.ops.layers.values() for tensor in layer.slots.store.layers[0])


def test_experts_from_disk(directories, whole):
    budget = 2 * 8 * 3 * 256 * 512 * 2
    model = offloaded(directories["qwen3_moe"], offload="experts", offload_from="disk", expert_cache_bytes=budget)
    assert answers(model) == whole("qwen3_moe")


@pytest.mark.parametrize("name", sorted(EXPERTS))
@pytest.mark.parametrize("home", ["host", "disk"])
def test_streamed_layers_have_the_bits_of_all_on_the_gpu(directories, whole, name, home):
    assert answers(offloaded(directories[name], offload="weights", offload_from=home)) == whole(name)
