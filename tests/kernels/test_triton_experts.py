"""The Triton experts against their meaning, in float32 through Triton's interpreter: no GPU needed.

pytest tests/kernels/test_triton_experts.py
"""

import pytest
import torch

pytest.importorskip("triton")

from moesaic.kernels.triton.experts.gate import PLAIN, Gate
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.experts.tuning import Choice
from tests.kernels import interpreter

interpreter.require()

PORTABLE = Choice("portable", align=16, block=16)
STREAMED = Choice("streamed", align=16, up_tile=(16, 16, 2, 4), down_tile=(16, 16, 2, 4))
DECODE = Choice("decode", up_tile=(16, 32, 2, 1), down_tile=(16, 32, 2, 1))


def gated(both_TG, F, clamped):
    gate_TF, up_TF = both_TG[:, :F], both_TG[:, F:]
    if not clamped:
        return torch.nn.functional.silu(gate_TF) * up_TF
    gate_TF = gate_TF.clamp(max=7.0)  # gpt-oss's
    return gate_TF * torch.sigmoid(1.702 * gate_TF) * (up_TF.clamp(-7.0, 7.0) + 1)


def meaning(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF, gate=PLAIN):
    F = down_EDF.shape[2]
    y_TD = torch.zeros_like(x_TD)
    for k in range(routes_TK.shape[1]):
        both_TG = torch.einsum("tgd,td->tg", gate_up_EGD[routes_TK[:, k]], x_TD)
        if gate.bias_EG is not None:
            both_TG = both_TG + gate.bias_EG[routes_TK[:, k]]
        hidden_TF = gated(both_TG, F, gate.clamped)
        y_TD = y_TD + weights_TK[:, k, None] * torch.einsum("tdf,tf->td", down_EDF[routes_TK[:, k]], hidden_TF)
    return y_TD


def problem(T, D, F, E, K, seed=0, one_expert=False):
    torch.manual_seed(seed)
    routes_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    if one_expert:
        routes_TK = torch.full((T, K), E - 1)
    return (
        torch.randn(T, D),
        routes_TK,
        torch.rand(T, K),
        torch.randn(E, 2 * F, D) / D**0.5,
        torch.randn(E, D, F) / F**0.5,
    )


SHAPES = {
    "plain": (9, 32, 16, 4, 2),
    "odd sizes": (7, 24, 20, 3, 3),
    "one token": (1, 16, 16, 5, 1),
    "idle experts": (3, 16, 16, 12, 2),
}


@pytest.mark.parametrize("choice", [PORTABLE, STREAMED, DECODE], ids=["portable", "streamed", "decode"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_forward(shape, choice):
    inputs = problem(*shape)
    torch.testing.assert_close(experts(*inputs, choice=choice), meaning(*inputs), rtol=1e-4, atol=1e-5)


def biased(E, F, clamped):
    """Numbers large enough that both bounds of the gate matter."""
    return Gate(clamped, 6 * torch.randn(E, 2 * F))


@pytest.mark.parametrize("choice", [PORTABLE, STREAMED, DECODE], ids=["portable", "streamed", "decode"])
@pytest.mark.parametrize("clamped", [True, False], ids=["clamped", "swiglu"])
def test_gates_with_biases(choice, clamped):
    inputs = problem(*SHAPES["odd sizes"])
    gate = biased(3, 20, clamped)
    torch.testing.assert_close(experts(*inputs, choice=choice, gate=gate), meaning(*inputs, gate), rtol=1e-4, atol=1e-4)


def test_gradients_of_a_clamped_gate_and_its_bias():
    x, routes, weights, gate_up, down = problem(*SHAPES["odd sizes"])
    gate = biased(3, 20, True)
    inputs = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down, gate.bias_EG)]
    grad = torch.randn(x.shape)
    wanted = torch.autograd.grad(meaning(x, routes, weights, gate_up, down, gate), inputs, grad)
    y = experts(x, routes, weights, gate_up, down, choice=PORTABLE, gate=gate)
    for one, other in zip(torch.autograd.grad(y, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_every_token_to_one_expert():
    inputs = problem(18, 16, 16, 3, 1, one_expert=True)
    for choice in (PORTABLE, STREAMED):
        torch.testing.assert_close(experts(*inputs, choice=choice), meaning(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [SHAPES["odd sizes"], SHAPES["idle experts"]], ids=["odd sizes", "idle experts"])
def test_gradients(shape):
    x, routes, weights, gate_up, down = problem(*shape)
    inputs = [tensor.requires_grad_() for tensor in (x, weights, gate_up, down)]
    grad = torch.randn(x.shape)
    wanted = torch.autograd.grad(meaning(x, routes, weights, gate_up, down), inputs, grad)
    given = torch.autograd.grad(experts(x, routes, weights, gate_up, down, choice=PORTABLE), inputs, grad)
    for one, other in zip(given, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("T, K, E", [(1100, 4, 6), (300, 4, 6), (5, 2, 40), (1, 1, 1)])
def test_routing_gives_each_assignment_a_row_in_order(T, K, E):
    torch.manual_seed(T)
    routes_TK = torch.randint(0, E, (T, K))
    routing = route(routes_TK, E, 16)
    routes_N = routes_TK.view(-1)
    counts = torch.bincount(routes_N, minlength=E)
    starts = torch.cumsum((counts + 15) // 16 * 16, 0) - (counts + 15) // 16 * 16
    assert routing.segments_E[:, 3].tolist() == starts.tolist()
    assert routing.segments_E[:, 4].tolist() == counts.tolist()
    for expert in range(E):
        slots = routing.slots_N[routes_N == expert]
        assert slots.tolist() == (starts[expert] + torch.arange(counts[expert])).tolist()
    assert (routing.sources_P[routing.slots_N.long()] == torch.arange(T * K)).all()
    for table, rows, total in ((routing.tiles, 16, 0), (routing.wide_tiles, 32, 1)):
        tiles = (counts + rows - 1) // rows
        assert routing.totals[total] == tiles.sum() <= table.shape[0]
        owners = torch.repeat_interleave(torch.arange(E), tiles)
        used = table[: len(owners)].long()
        assert used[:, 0].tolist() == owners.tolist()
        assert used[:, 1].tolist() == (torch.cumsum(tiles, 0) - tiles)[owners].tolist()
        assert used[:, 2].tolist() == tiles[owners].tolist()
        assert used[:, 3].tolist() == starts[owners].tolist() and used[:, 4].tolist() == counts[owners].tolist()
