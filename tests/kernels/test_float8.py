"""Matmuls in float8 to train with, as they are meant: how far rounding goes, and which gradients it reaches.

pytest tests/kernels/test_float8.py
"""

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels import reference
from moesaic.kernels.float8 import Float8Kernels, ReferenceFloat8, rounded_blocks, rounded_rows
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights

STEP = 2.0**-4  # half of the distance of two numbers with three bits after the first, relative


def error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def gradients(run, *inputs):
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = run(*inputs)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(9)))
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def test_each_group_of_a_row_has_a_scale_of_its_own():
    x_TI = torch.randn(4, 400)
    x_TI[0, :128] *= 1e4
    x_TI[1, 390:] *= 1e-6
    found = rounded_rows(x_TI)
    for group in range(4):
        part, rounded = (tensor[:, group * 128 : (group + 1) * 128] for tensor in (x_TI, found))
        largest_T1 = part.abs().amax(1, keepdim=True)
        torch.testing.assert_close(rounded.abs().amax(1, keepdim=True), largest_T1, rtol=1e-6, atol=0)
        allowed = (part.abs() * STEP).clamp(min=0) + largest_T1 * 2.0**-9 / 448  # of what is near zero
        assert ((rounded - part).abs() <= allowed * 1.001).all()
        assert not torch.equal(rounded, part)
    torch.testing.assert_close(rounded_rows(8 * x_TI), 8 * found, rtol=1e-6, atol=0)


def test_each_block_of_a_matrix_has_a_scale_of_its_own():
    weight = torch.randn(2, 300, 200)
    weight[0, :128, :128] *= 1e3
    found = rounded_blocks(weight)
    for rows in (slice(0, 128), slice(128, 256), slice(256, None)):
        for columns in (slice(0, 128), slice(128, None)):
            part, rounded = weight[0, rows, columns], found[0, rows, columns]
            assert 0.01 < error(rounded, part) < 0.04
            torch.testing.assert_close(rounded.abs().max(), part.abs().max(), rtol=1e-6, atol=0)
    torch.testing.assert_close(rounded_blocks(weight.mT), found.mT, rtol=0, atol=0)


def test_a_linear_map_is_of_rounded_numbers_and_only_its_weights_gradient_is_not():
    x_TI, weight_OI, bias_O = torch.randn(20, 300), torch.randn(150, 300), torch.randn(150)
    out, d_x, d_weight, d_bias = gradients(ReferenceFloat8().linear, x_TI, weight_OI, bias_O)
    plain_out, plain_x, plain_weight, plain_bias = gradients(F.linear, x_TI, weight_OI, bias_O)
    torch.testing.assert_close(out, rounded_rows(x_TI) @ rounded_blocks(weight_OI).T + bias_O)
    d_out = torch.randn(20, 150, generator=torch.Generator().manual_seed(9))
    torch.testing.assert_close(d_x, rounded_rows(d_out) @ rounded_blocks(weight_OI))
    assert 0.01 < error(out, plain_out) < 0.06 and 0.01 < error(d_x, plain_x) < 0.06
    assert torch.equal(d_weight, plain_weight) and torch.equal(d_bias, plain_bias)


def test_experts_and_all_their_gradients_stay_near_those_in_float32():
    torch.manual_seed(0)
    T, D, width, E = 60, 256, 128, 4
    given = torch.randn(T, D), torch.rand(T, 2), torch.randn(E, 2 * width, D) / 16, torch.randn(E, D, width) / 11
    routes_TK = torch.stack([torch.randperm(E)[:2] for _ in range(T)])

    def by(experts):
        def run(x_TD, weights_TK, gate_up, down):
            return experts(x_TD, Routes(routes_TK, weights_TK), ExpertWeights(gate_up, down, "silu"))

        return gradients(run, *given)

    for found, wanted in zip(by(ReferenceFloat8().experts), by(reference.experts), strict=True):
        assert 0.005 < error(found, wanted) < 0.1


@pytest.mark.parametrize(
    ("site", "rounded"),
    [
        ("layers.3.attention.qkv", True),
        ("layers.0.ffn.shared.down", True),
        ("layers.3.ffn.router", False),
        ("layers.3.attention.kv_up", False),
        ("layers.3.attention.indexer.keys", False),
        ("head", False),
        ("", False),
    ],
)
def test_what_is_multiplied_in_float8(site, rounded):
    kernels = Float8Kernels(reference, ReferenceFloat8())
    x_TI, weight_OI = torch.randn(5, 128), torch.randn(64, 128, requires_grad=True)
    plain = x_TI @ weight_OI.T
    assert torch.equal(kernels.linear(x_TI, weight_OI, None, site), F.linear(x_TI, weight_OI)) != rounded
    with torch.no_grad():
        torch.testing.assert_close(kernels.linear(x_TI, weight_OI, None, site), plain)
