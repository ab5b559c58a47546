"""LoRA adapters in CUDA graphs: the bits of plain blocks, alone and beside others, and what merged weights say.

pytest tests/gpu/test_gpu_adapters.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.forward_pass import Runner
from moesaic.serve.core.request import Sampling
from moesaic.serve.gpu.overlap import OverlapLoop
from tests.gpu.models import tokens_of
from tests.serve.random_adapters import random_adapter

pytestmark = pytest.mark.usefixtures("exact_float32")
SITES = {"qwen3_moe": ("qkv", "out", "gate_up"), "glm4_moe": ("qkv", "down"), "deepseek_v3": ("q_up", "kv_down", "out")}


def answers(engine, prompts, names, out=24):
    """Tokens, and log-probabilities to the bit."""
    sampling = Sampling(max_tokens=out, temperature=0.0)
    requests = [engine.request(prompt, sampling, adapter=name) for prompt, name in zip(prompts, names, strict=True)]
    found = {request.number: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.working:
        for output in engine.step():
            found[output.request.number] += [(entry.token, entry.logprob) for entry in output.logprobs]
    return [found[request.number] for request in requests]


def serving(model, adapters, **options):
    engine = Engine(model, cache_bytes=1 << 26, **options)
    assert isinstance(engine.runner, OverlapLoop), "steps overlap"
    engine.adapters = {adapter.name: adapter for adapter in adapters}
    return engine


@pytest.mark.parametrize("name", SITES)
def test_bits_alone_in_a_batch_and_block_by_block_are_the_same(directories, name):
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device="cuda")
    made = [random_adapter(model, f"a{rank}", rank, rank, 0.1, SITES[name]) for rank in (8, 40)]
    prompts = tokens_of(5, 100, 33, 17, 64, 9)
    names = [None, "a8", "a40", "a8", None, "a40"]
    engine = serving(model, made)
    together = answers(engine, prompts, names)
    alone = [answers(engine, [prompt], [own])[0] for prompt, own in zip(prompts, names, strict=True)]
    assert together == alone
    assert any(shape.adapted for shape in engine.runner.steps.graphs)
    assert answers(serving(model, made), prompts, [None] * 6)[0] == together[0], "another's adapter changes nobody"
    if name != "deepseek_v3":  # plain blocks expand the latents of an adapted model for every token
        blocks = serving(model, made)
        blocks.runner = Runner(blocks)
        assert answers(blocks, prompts, names)[1:4] == together[1:4]


def test_greedy_text_is_that_of_merged_weights(directories):
    model = moesaic.load(directories["qwen3_moe"], dtype=torch.float32, device="cuda")
    adapter = random_adapter(model, "a", 8, 0, 0.1, ("qkv", "out"))
    prompts = tokens_of(5, 100, 33)
    found = answers(serving(model, [adapter]), prompts, ["a"] * 3)
    plain = answers(serving(model, []), prompts, [None] * 3)
    with torch.no_grad():
        for site, (down_RI, up_OR) in adapter.corrections.items():
            model.get_submodule(site).weight += up_OR @ down_RI
    merged = answers(serving(model, []), prompts, [None] * 3)
    tokens = [[[token for token, _ in answer] for answer in these] for these in (found, merged, plain)]
    assert tokens[0] == tokens[1] != tokens[2]


def test_a_request_that_ends_hands_its_slot_and_its_adapters_number_on(directories):
    model = moesaic.load(directories["qwen3_moe"], dtype=torch.bfloat16, device="cuda")
    made = [random_adapter(model, f"a{seed}", 8, seed, 0.1, ("qkv",)) for seed in range(6)]
    engine = serving(model, made, max_requests=2)
    prompts = tokens_of(*(9 + number for number in range(12)))
    names = [f"a{number % 6}" if number % 3 else None for number in range(12)]
    together = answers(engine, prompts, names, out=6)
    assert together == [answers(engine, [one], [own], 6)[0] for one, own in zip(prompts, names, strict=True)]
    assert engine.page_pool.in_use == 0
