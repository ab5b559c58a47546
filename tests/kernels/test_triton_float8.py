"""Matmuls and experts in float8, in Triton's interpreter: what numbers and scales stand for, alone and in a batch.

pytest tests/kernels/test_triton_float8.py
"""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from moesaic.kernels.float8 import block_numbers
from moesaic.kernels.interface import Routes
from moesaic.kernels.triton.experts import rows
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.float8.matmul import round_rows
from moesaic.kernels.triton.float8.rounding import round_both_ways, round_sorted
from moesaic.kernels.triton.float8.swiglu import swiglu_backward
from moesaic.kernels.triton.float8.weight import Float8Weight, experts
from tests.kernels import interpreter

interpreter.require()


def plain(numbers_TI, scales_TG):
    return numbers_TI.float() * scales_TG.repeat_interleave(128, 1)[:, : numbers_TI.shape[1]]


def rounded(x_TI):
    return plain(*round_rows(x_TI))


@pytest.mark.parametrize("inputs", [128, 200, 1100])
def test_rows_are_rounded_to_what_float8_can_say(inputs):
    x_TI = torch.randn(5, inputs) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1e4])[:, None]
    numbers_TI, scales_TG = round_rows(x_TI)
    assert numbers_TI.dtype == torch.float8_e4m3fn and scales_TG.shape == (5, -(-inputs // 128))
    spread = scales_TG.repeat_interleave(128, 1)[:, :inputs]
    wanted = (x_TI / spread).to(torch.float8_e4m3fn).float()
    # Triton's interpreter, and only that, halves what is rounded up to a power of two.
    carried = (wanted.abs().log2() % 1 == 0) & (wanted.abs() > (x_TI / spread).abs())
    assert torch.equal(numbers_TI.float()[~carried], wanted[~carried])
    assert (numbers_TI.float().abs().amax(1)[[0, 1, 2, 4]] == 448).all() and not numbers_TI[3].float().any()


@pytest.mark.parametrize("inputs", [128, 200, 1100])
def test_rows_are_rounded_in_the_order_of_their_experts(inputs):
    x_TI, routes_TK = torch.randn(9, inputs), torch.tensor([[0, 2], [1, -1], [2, 0]] * 3, dtype=torch.int32)
    routing = route(routes_TK, 3, 16)
    numbers_TI, scales_TG = round_rows(x_TI)
    numbers_PI, scales_GP = round_sorted(x_TI, routing, 2)
    for assignment, slot in enumerate(routing.slots_N.tolist()):
        if slot >= 0:
            assert torch.equal(numbers_PI[slot].view(torch.uint8), numbers_TI[assignment // 2].view(torch.uint8))
            assert torch.equal(scales_GP[:, slot], scales_TG[assignment // 2])
    assert routing.slots_N.ge(0).sum() == 15 and scales_GP.shape[1] >= routing.rows
    plain, plain_GT = round_sorted(x_TI)
    assert torch.equal(plain.float(), numbers_TI.float()) and torch.equal(plain_GT[:, :9].T, scales_TG)


def test_the_gradients_of_gate_and_up_come_rounded_too():
    T, K, E, width = 10, 2, 3, 384
    torch.manual_seed(0)
    routing = route(torch.stack([torch.randperm(E)[:K] for _ in range(T)]).int(), E, 16)
    grad_PF, gate_up_PG = torch.randn(routing.rows, width), torch.randn(routing.rows, 2 * width)
    weights_TK, again_PF = torch.rand(T, K), grad_PF.clone()
    wanted, wanted_weights = rows.swiglu_backward(grad_PF, gate_up_PG, weights_TK, routing, False)
    found, found_weights, (numbers, scales_GP) = swiglu_backward(again_PF, gate_up_PG, weights_TK, routing, False)
    at = routing.slots_N.long()
    torch.testing.assert_close(found_weights, wanted_weights)
    assert torch.equal(found[at], wanted[at]) and torch.equal(again_PF[at], grad_PF[at])
    rounded_PG, rounded_GP = round_sorted(wanted)
    assert torch.equal(numbers.float()[at], rounded_PG.float()[at]) and torch.equal(scales_GP[:, at], rounded_GP[:, at])


def test_matrices_are_rounded_once_for_both_directions():
    weight = torch.randn(2, 300, 200)
    (numbers, scales), turned = round_both_ways(weight)
    wanted, wanted_scales = block_numbers(weight)
    spread = wanted_scales.repeat_interleave(128, 1)[:, :300].repeat_interleave(128, 2)[..., :200]
    exact = (weight / spread).abs()  # as above, the interpreter rounds some of them otherwise
    kept = ((wanted.float().abs().log2() % 1 != 0) | (wanted.float().abs() <= exact)) & (exact > 2.0**-6)
    assert torch.equal(numbers.float()[kept], wanted.float()[kept]) and torch.equal(scales, wanted_scales)
    assert torch.equal(turned[0].float(), numbers.float().mT) and torch.equal(turned[1], scales.mT)


def test_rounding_takes_the_gate_along():
    gate_up_TG = torch.randn(4, 600)
    gate, up = gate_up_TG.chunk(2, 1)
    found, wanted = round_rows(gate_up_TG, gated=True), round_rows(F.silu(gate) * up)
    torch.testing.assert_close(plain(*found), plain(*wanted), rtol=0.07, atol=1e-3)
    torch.testing.assert_close(found[1], wanted[1])


def test_a_weight_is_rounded_by_blocks():
    weight = torch.randn(2, 300, 200)
    weight[0, :128, :128] *= 100
    made = Float8Weight.rounded(weight)
    assert made.scales_ENG.shape == (2, 3, 2) and made.bytes < weight.numel() * 1.1
    assert ((made.dense() - weight).norm() / weight.norm()) < 0.03
    torch.testing.assert_close(made.scales_ENG[0, 0, 0], weight[0, :128, :128].abs().max() / 448)


@pytest.mark.parametrize("outputs, inputs", [(300, 200), (128, 384)])
def test_a_matmul_is_of_rounded_rows_whatever_is_beside_them(outputs, inputs):
    weight, bias = Float8Weight.rounded(torch.randn(outputs, inputs)), torch.randn(outputs)
    x_TI = torch.randn(33, inputs)
    found = weight.linear(x_TI, bias)
    torch.testing.assert_close(found, rounded(x_TI) @ weight.dense().T + bias, rtol=1e-4, atol=1e-3)
    for row in (0, 20, 32):
        assert torch.equal(weight.linear(x_TI[row : row + 1], bias)[0], found[row])


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_sorted_and_not(tokens):
    torch.manual_seed(tokens)
    gate_up, down = (Float8Weight.rounded(torch.randn(4, *shape) / 12) for shape in ((384, 256), (256, 192)))
    x_TD, weights_TK = torch.randn(tokens, 256), torch.rand(tokens, 2)
    routes_TK = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).int()
    found = experts(x_TD, Routes(routes_TK, weights_TK), gate_up, down)
    x, wanted = rounded(x_TD), torch.zeros(tokens, 256)
    for token in range(tokens):
        for k, expert in enumerate(routes_TK[token].tolist()):
            gate, up = (gate_up.dense()[expert] @ x[token]).chunk(2)
            hidden = rounded((F.silu(gate) * up)[None])[0]
            wanted[token] += weights_TK[token, k] * (down.dense()[expert] @ hidden)
    assert (found - wanted).norm() / wanted.norm() < 5e-3, "numbers in the middle may be rounded the other way"
    alone = experts(x_TD[:1], Routes(routes_TK[:1], weights_TK[:1]), gate_up, down)
    assert torch.equal(alone[0], found[0]), "40 tokens are sorted, one is not"


def test_a_row_that_is_no_token_makes_nothing():
    gate_up, down = (Float8Weight.rounded(torch.randn(2, *shape)) for shape in ((256, 128), (128, 128)))
    routes = Routes(torch.tensor([[0], [-1]], dtype=torch.int32), torch.ones(2, 1))
    found = experts(torch.randn(2, 128), routes, gate_up, down)
    assert found[0].abs().sum() > 0 and not found[1].any()
