"""Float8 (W8A8) on a real GPU: near what its numbers stand for, the same bits in any batch, whole models as graphs.

pytest tests/gpu/test_gpu_float8.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.errors import UserError
from moesaic.kernels.interface import Routes
from moesaic.kernels.triton.float8.matmul import round_rows
from moesaic.kernels.triton.float8.weight import Float8Weight, experts
from moesaic.serve.core.engine import Engine
from moesaic.serve.float8 import round_to_float8
from moesaic.serve.gpu.overlap import OverlapLoop
from tests.gpu.models import error, tokens_of

if torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("this GPU has no float8 tensor cores", allow_module_level=True)


def random(*shape, seed=0, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


def plain(x_TI):
    numbers, scales = round_rows(x_TI)
    return numbers.float() * scales.repeat_interleave(128, 1)[:, : x_TI.shape[1]]


def test_rows_are_rounded_as_torch_rounds():
    x_TI = random(64, 1100)
    numbers, scales = round_rows(x_TI)
    spread = scales.repeat_interleave(128, 1)[:, :1100]
    assert torch.equal(numbers.float(), (x_TI.float() / spread).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("outputs, inputs", [(1408, 4096), (5120, 2048), (300, 712)])
def test_a_matmul_and_its_bits_in_any_batch(outputs, inputs):
    weight = Float8Weight.rounded(random(outputs, inputs, scale=0.02))
    x_TI = random(3000, inputs, seed=1)
    whole = weight.linear(x_TI)
    assert error(whole, plain(x_TI) @ weight.dense().T) < 4e-3
    for rows in (1, 2, 7, 16, 33, 100, 257):
        assert torch.equal(weight.linear(x_TI[:rows]), whole[:rows]), rows


@pytest.mark.parametrize("shape", [(2048, 768, 128, 8), (512, 384, 16, 4)])
def test_experts_and_their_bits_in_any_batch(shape):
    D, F, E, K = shape
    up, down = random(E, 2 * F, D, scale=0.03), random(E, D, F, scale=0.03)
    made = Float8Weight.rounded(up), Float8Weight.rounded(down)
    x_TD = random(2000, D, seed=1)
    torch.manual_seed(0)
    routes_TK = torch.rand(2000, E, device="cuda").topk(K, -1).indices.int()
    weights_TK = torch.rand(2000, K, device="cuda")
    whole = experts(x_TD, Routes(routes_TK, weights_TK), *made)
    wanted = torch.zeros(50, D, device="cuda")
    for token in range(50):
        for k, expert in enumerate(routes_TK[token].tolist()):
            gate, up_F = (up[expert].float() @ x_TD[token].float()).chunk(2)
            wanted[token] += weights_TK[token, k] * (down[expert].float() @ (torch.nn.functional.silu(gate) * up_F))
    assert error(whole[:50], wanted) < 0.08, "of weights and inputs of three bits after the first"
    for rows in (1, 3, 8, 20, 100, 700):
        assert torch.equal(experts(x_TD[:rows], Routes(routes_TK[:rows], weights_TK[:rows]), *made), whole[:rows]), rows


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_a_model_is_served_in_float8_as_graphs(directories, name):
    model = moesaic.load(directories[name], dtype=torch.bfloat16, device="cuda")
    prompts = tokens_of(5, 100, 33, 17)
    plain_logprobs = [found.float() for found in model.logprobs(prompts)]
    before = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    round_to_float8(model)
    assert sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]) < 0.8 * before
    engine = Engine(model, cache_bytes=1 << 26)
    assert isinstance(engine.runner, OverlapLoop), "steps overlap"
    together = engine.generate(prompts, max_tokens=16, temperature=0.0)
    alone = [engine.generate([prompt], max_tokens=16, temperature=0.0)[0] for prompt in prompts]
    found, wanted = ([(a.tokens, [e.logprob for e in a.logprobs]) for a in answers] for answers in (together, alone))
    assert found == wanted
    for given, expected in zip(model.logprobs(prompts), plain_logprobs, strict=True):
        assert (given - expected).abs().mean() < 0.5, "other weights are off by two"
    with pytest.raises(UserError, match="quantized already"):
        round_to_float8(model)
