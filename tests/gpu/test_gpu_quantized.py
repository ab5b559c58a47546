"""Compressed models on a real GPU: made there, equal to the matrices they stand for, and served in graphed steps.

pytest tests/gpu/test_gpu_quantized.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

from torch import nn

import moesaic
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.kernels import reference
from moesaic.kernels.cuda.fused_forward import outside
from moesaic.kernels.grid import Grid
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.rows import permute, swiglu
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.quantized import matmul as portable
from moesaic.kernels.triton.quantized.hopper import matmul as hopper
from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight, gpu_weight
from moesaic.methods import Method, build
from moesaic.serve.gpu.overlap import step_weights
from tests.compress.made import add_tokenizer
from tests.gpu.models import error, saved, tokens_of

DEVICE = "cuda"
pytestmark = pytest.mark.usefixtures("exact_float32")
SCHEMES = [(4, 128, True), (4, 64, False), (4, 192, True), (3, 96, False), (8, 0, True), (5, 64, False)]


def matrix(outputs, inputs, scheme, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    weight = torch.randn(outputs, inputs, device=DEVICE, generator=generator) / inputs**0.5
    return Grid(*scheme).matrix(weight)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(512, 640), (576, 200), (1408, 4096)])
def test_linear(scheme, inputs, outputs):
    made = matrix(outputs, inputs, scheme)
    quantized = gpu_weight(made, torch.bfloat16)
    assert isinstance(quantized, GpuQuantizedWeight)
    x = torch.randn(300, inputs, device=DEVICE).bfloat16()
    whole = linear(x, quantized)
    assert error(whole, x.float() @ made.dense().T) < 0.004  # of rounding the results to bf16
    for rows in (1, 2, 15, 16, 17, 64, 100):  # the same bits, whatever the tile
        assert torch.equal(linear(x[:rows], quantized), whole[:rows]), rows
    exact = gpu_weight(made, torch.float32)
    assert error(linear(x.float(), exact), x.float() @ made.dense().T) < 1e-5


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(512, 256), (1024, 384), (2048, 768), (2560, 1408)])
def test_experts(scheme, hidden, width):
    gate_up = nn.ModuleList(matrix(2 * width, hidden, scheme, number) for number in range(16))
    down = nn.ModuleList(matrix(hidden, width, scheme, 99 + number) for number in range(16))
    quantized = [gpu_weight(part, torch.bfloat16) for part in (gate_up, down)]
    x = torch.randn(200, hidden, device=DEVICE).bfloat16()
    routes = torch.rand(200, 16, device=DEVICE).topk(4).indices
    weights = torch.rand(200, 4, device=DEVICE)
    whole = experts(x, routes, weights, *quantized)
    dense = [torch.stack([one.dense() for one in part]) for part in (gate_up, down)]
    wanted = reference.experts(x.float(), Routes(routes, weights), ExpertWeights(*dense, "silu"))
    assert error(whole, wanted) < 0.008
    for rows in (1, 2, 3, 40, 199):
        assert torch.equal(experts(x[:rows], routes[:rows], weights[:rows], *quantized), whole[:rows]), rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("hidden", "width"), [(2048, 768), (4096, 1408)])
def test_bits_of_millions_of_results(hidden, width, bits):
    """Where sixteen inputs are added in another order, one result in some ten thousands has another last bit."""
    quantized = [
        gpu_weight(nn.ModuleList(matrix(*size, (bits, 128, True), number) for number in range(16)), torch.bfloat16)
        for size in ((2 * width, hidden), (hidden, width))
    ]
    x = torch.randn(1024, hidden, device=DEVICE).bfloat16()
    routes = torch.rand(1024, 16, device=DEVICE).topk(4).indices
    weights = torch.rand(1024, 4, device=DEVICE)
    whole = experts(x, routes, weights, *quantized)
    plain = gpu_weight(matrix(4096, hidden, (bits, 128, True)), torch.bfloat16)
    wide = linear(x, plain)
    for tokens in (1, 4, 16):
        for start in range(0, 1024, tokens):
            rows = slice(start, start + tokens)
            assert torch.equal(experts(x[rows], routes[rows], weights[rows], *quantized), whole[rows]), (tokens, start)
            assert torch.equal(linear(x[rows], plain), wide[rows]), (tokens, start)


@pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="kernels for Hopper")
@pytest.mark.parametrize(
    "scheme", [(4, 128, True), (4, 64, False), (4, 192, True), (8, 128, True), (8, 64, False)], ids=str
)
def test_many_rows_have_the_bits_of_few(scheme):
    """Experts with no rows, with a few, with many tiles of them; a last tile of columns that is not whole."""
    hidden, width, tokens, choices = 1536, 384, 700, 2
    gate_up, down = (
        gpu_weight(nn.ModuleList(matrix(*size, scheme, number) for number in range(8)), torch.bfloat16)
        for size in ((2 * width, hidden), (hidden + 48, width))
    )
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    likely = torch.tensor([8.0, 8, 4, 1, 0.3, 0.1, 0.02, 0], device=DEVICE)
    routes = torch.multinomial(likely.expand(tokens, 8), choices)
    routing = route(routes, 8, 128)
    slots = routing.slots_N.long()
    sorted_x = permute(x, routing, choices)
    wanted = swiglu(portable.matmul(sorted_x, gate_up, None, routing))
    assert torch.equal(hopper.matmul(sorted_x, gate_up, None, routing, pair=True)[slots], wanted[slots])
    out = portable.matmul(wanted, down, None, routing)
    assert torch.equal(hopper.matmul(wanted, down, None, routing)[slots], out[slots])
    one, bias = gpu_weight(matrix(hidden + 48, width, scheme), torch.bfloat16), torch.randn(hidden + 48, device=DEVICE)
    few = torch.cat([portable.linear(part, one, bias) for part in wanted[slots].split(16)])
    assert torch.equal(hopper.matmul(wanted[slots], one, bias), few)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = saved(tmp_path_factory)
    add_tokenizer(made["qwen3_moe"])
    return made


METHODS = {
    "rtn": {"bits": 4, "group": 32},
    "gptq": {"bits": 3, "group": 64},
    "hqq": {"bits": 4, "group": 64},
    "awq": {"bits": 8, "group": 0},
    "milo": {"bits": 3, "group": 64, "rank": 8, "turns": 2},
    "zeroquant": {"bits": 8, "group": 0, "steps": 2},
    "mixed": {"bits": 4.0},
    "nm": {"score": "admm", "bits": 4, "rounds": 4},
    "xtc": {"bits": 2, "depth": 1.0, "steps": 3},
    "prune_experts": {"keep": 8},
    "merge_experts": {"keep": 8},
    "students": {"depth": 0.7, "steps": 3},
}


@pytest.mark.parametrize("name", METHODS)
def test_made_and_served(directories, tmp_path, name):
    """Logits are those of the reference kernels; the engine's text is that of the model run as plain blocks."""
    method = build(Method(name, METHODS[name]), Compressor, "test")
    wish = CompressionRequest(samples=4, length=64, check_tokens=64, force=True)
    reported = compress(directories["qwen3_moe"], method, tmp_path / "small", wish)
    assert reported["perplexity"] > 1
    plain = moesaic.load(tmp_path / "small", dtype=torch.float32, device=DEVICE, mode="reference")
    wide = moesaic.load(tmp_path / "small", dtype=torch.float32, device=DEVICE)
    prompts = tokens_of(40, 7, 100)
    for given, wanted in zip(wide.logits(prompts), plain.logits(prompts), strict=True):
        # What flows into a matrix of W8A8 is rounded: where it lies between two steps, the last bits of a sum decide.
        assert error(given, wanted) < (0.05 if name == "zeroquant" else 1e-4)
    model = moesaic.load(tmp_path / "small", dtype=torch.bfloat16, device=DEVICE)
    assert (outside(step_weights(model)) is None) == (name != "zeroquant")
    engine = moesaic.Engine(model, cache_bytes=1 << 26)
    together = engine.generate(prompts, max_tokens=12, temperature=0.0)
    alone = [engine.generate([prompt], max_tokens=12, temperature=0.0)[0] for prompt in prompts]
    if name != "zeroquant":  # its matmuls are the library's, which may add in another order in a batch
        assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert all(len(one.tokens) == 12 for one in together)
