"""Quantized matrices in Triton's interpreter, in float32, against the plain matrices they stand for.

pytest tests/kernels/test_triton_quantized.py
"""

from functools import cache

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from moesaic.compress import gptq_rounding as gptq
from moesaic.compress import refine
from moesaic.kernels import reference
from moesaic.kernels.grid import Grid
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.quantized import QuantizedKernels
from moesaic.kernels.triton.embedding import embed
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.quantized import rounding
from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight, gpu_weight
from tests.kernels import interpreter

interpreter.require()


def close(given, wanted):
    torch.testing.assert_close(given, wanted, rtol=2e-5, atol=2e-5)


def matrix(outputs, inputs, bits, group, symmetric, seed=0):
    torch.manual_seed(seed)
    return Grid(bits, group, symmetric).matrix(torch.randn(outputs, inputs) / 8)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with-zeros"])
@pytest.mark.parametrize(
    ("bits", "group", "inputs"),
    [(4, 64, 256), (4, 32, 96), (3, 96, 200), (2, 128, 256), (8, 0, 70), (5, 64, 128), (4, 0, 100), (6, 128, 512)],
)
def test_matmuls_and_rows(bits, group, inputs, symmetric):
    made = matrix(40, inputs, bits, group, symmetric)
    quantized = gpu_weight(made, torch.float32)
    assert isinstance(quantized, GpuQuantizedWeight) and quantized.bytes < 1.7 * made.bytes * max(
        quantized.bits / bits, 1
    )
    close(quantized.dense(), made.dense())
    for tokens in (1, 5, 20):
        x = torch.randn(tokens, inputs)
        bias = torch.randn(40)
        close(linear(x, quantized), x @ made.dense().T)
        close(linear(x, quantized, bias), x @ made.dense().T + bias)
        close(QuantizedKernels(reference).linear(x[None], quantized, bias), (x @ made.dense().T + bias)[None])
    chosen = torch.tensor([3, 39, 0, 3])
    assert torch.equal(quantized.rows(chosen), quantized.dense()[chosen])
    unknown = torch.tensor([-1, 5], dtype=torch.int32)
    found = embed(unknown, torch.tensor([1, 0]), torch.tensor([0, 7]), quantized)
    assert torch.equal(found, quantized.dense()[[7, 5]])


@cache  # the same for every number of tokens
def mixture(count, hidden, width, bits, symmetric, group=32):
    gate_up = [matrix(2 * width, hidden, bits[e % len(bits)], group, symmetric, e) for e in range(count)]
    down = [matrix(hidden, width, bits[e % len(bits)], group, symmetric, 50 + e) for e in range(count)]
    return nn.ModuleList(gate_up), nn.ModuleList(down)


@pytest.mark.parametrize("bits", [(4,), (3, 4, 2), (8, 4)], ids=["4", "up-to-4", "up-to-8"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with-zeros"])
@pytest.mark.parametrize("tokens", [1, 2, 9, 40])
def test_experts(bits, symmetric, tokens):
    gate_up, down = mixture(8, 96, 48, bits, symmetric)
    quantized_up, quantized_down = gpu_weight(gate_up, torch.float32), gpu_weight(down, torch.float32)
    torch.manual_seed(3)
    x = torch.randn(tokens, 96)
    routes = torch.rand(tokens, 8).topk(3).indices
    weights = torch.rand(tokens, 3)
    dense = [torch.stack([one.dense() for one in matrices]) for matrices in (gate_up, down)]
    wanted = reference.experts(x, Routes(routes, weights), ExpertWeights(*dense, "silu"))
    close(experts(x, routes, weights, quantized_up, quantized_down), wanted)
    close(experts(x, routes, weights, quantized_up, dense[1]), wanted)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with-zeros"])
@pytest.mark.parametrize("group, hidden, width", [(32, 320, 16), (64, 640, 16), (0, 16, 320)])
def test_a_token_alone_over_more_than_a_chunk_of_inputs(group, hidden, width, symmetric):
    gate_up, down = mixture(3, hidden, width, (4,), symmetric, group)
    dense = [torch.stack([one.dense() for one in matrices]) for matrices in (gate_up, down)]
    torch.manual_seed(4)
    x, routes, weights = torch.randn(1, hidden), torch.tensor([[2, 0]]), torch.rand(1, 2)
    wanted = reference.experts(x, Routes(routes, weights), ExpertWeights(*dense, "silu"))
    close(
        experts(x, routes, weights, gpu_weight(gate_up, torch.float32), gpu_weight(down, torch.float32)),
        wanted,
    )


def test_rows_that_are_no_tokens_choose_no_experts():
    gate_up, down = (gpu_weight(part, torch.float32) for part in mixture(4, 64, 32, (4,), True))
    x, weights = torch.randn(18, 64), torch.rand(18, 2)
    routes = torch.rand(18, 4).topk(2).indices
    routes[7:9] = -1
    real = [row for row in range(18) if row not in (7, 8)]
    found = experts(x, routes, weights, gate_up, down)
    close(found[real], experts(x[real], routes[real], weights[real], gate_up, down))
    assert not found[7:9].any()


@pytest.mark.parametrize("sparse", [False, True], ids=["all", "some-kept"])
def test_searches_from_input_to_input(sparse):
    """The launches for a block against the same, step by step."""
    torch.manual_seed(0)
    outputs, inputs, top, start, stop = 21, 40, 15, 8, 33
    weight, scales = torch.randn(outputs, inputs), torch.rand(outputs, inputs) / 4 + 0.1
    zeros, kept = torch.full_like(weight, 8.0), torch.rand(outputs, inputs) < 0.5
    rows = torch.randn(200, inputs)
    moments = rows.T @ rows / 200
    upper = gptq.inverse_factor(moments)
    found = []
    for run in (gptq.corrected, rounding.corrected):
        codes = torch.zeros_like(weight)
        mask = kept if sparse else None
        errors = run(weight.clone(), scales, zeros, mask, upper, codes, start, stop, top)
        found.append((codes[:, start:stop], errors))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    found = []
    for run in (refine.among_others, rounding.among_others):
        codes = torch.randint(0, 16, (inputs, outputs), generator=torch.Generator().manual_seed(1)).float()
        per_code = 1 / (moments.diagonal()[:, None] * scales.T.contiguous())
        moves = run(weight.T.contiguous(), codes, scales.T.contiguous(), per_code, moments, start, stop, top)
        found.append((codes, moves))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_what_has_corrections_becomes_plain_and_what_rounds_its_inputs_stays():
    made = matrix(32, 64, 3, 64, False)
    made.down_RI, made.up_OR = matrix(4, 64, 4, 64, True), matrix(32, 4, 4, 32, True)
    plain = gpu_weight(made, torch.float32)
    assert isinstance(plain, torch.Tensor) and torch.equal(plain, made.dense())
    rounds = Grid(8, 64, activation_bits=8).matrix(torch.randn(32, 64))
    assert gpu_weight(rounds, torch.float32) is rounds
