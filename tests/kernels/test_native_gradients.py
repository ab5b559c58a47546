"""Gradients of the native training operations against autograd through the reference, in float64."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels import native, reference
from moesaic.kernels.interface import AttentionCall, QKNorm, RopeAngles
from moesaic.model.layout import Layout

OPS = native.kernels()


def gradients(function, tensors):
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((out * torch.arange(out.numel(), dtype=out.dtype).view(out.shape).sin()).sum() for out in outputs)
    loss.backward()
    return [out.detach() for out in outputs], [leaf.grad for leaf in leaves if leaf is not None]


def same(own, expected, tensors):
    """`own` on float32, `expected` on float64."""
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    for ours, theirs in zip(gradients(own, tensors), gradients(expected, wide), strict=True):
        for mine, true in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=0, atol=1e-5 * float(true.abs().max()) + 1e-5)


@pytest.mark.parametrize("shape", [(1, 5), (3, 64), (150, 96), (20, 6, 16)], ids=str)
def test_norm(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    same(lambda *a: OPS.rms_norm(*a, 1e-5), lambda *a: wide_norm(*a, 1e-5), (x, weight))
    with torch.no_grad():
        assert torch.equal(OPS.rms_norm(x, weight, 1e-5), OPS.rms_norm(x.requires_grad_(), weight, 1e-5))


def wide_norm(x, weight, eps):
    """The reference rounds to float32 on the way."""
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("turning", [6, 16])
def test_heads(normed, interleaved, turning):
    qkv, angles = torch.randn(70, 10, 16), torch.randn(70, turning // 2)
    weights = (torch.randn(16), torch.randn(16)) if normed else (None, None)

    def norm(q_weight, k_weight):
        return None if q_weight is None else QKNorm(q_weight, k_weight, 1e-5)

    def own(qkv, q_weight, k_weight):
        return OPS.qk_norm_rope(qkv, 2, norm(q_weight, k_weight), RopeAngles(angles.cos(), angles.sin(), interleaved))

    def expected(qkv, q_weight, k_weight):
        rope = RopeAngles(angles.double().cos(), angles.double().sin(), interleaved)
        return reference.qk_norm_rope(qkv, 2, norm(q_weight, k_weight), rope, rms_norm=wide_norm)

    same(own, expected, (qkv, *weights))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_gated(size):
    gate_up = torch.randn(50, 2 * size) * 4
    same(lambda x: OPS.gated(x, "silu"), lambda x: reference.gated(x, "silu"), (gate_up,))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 9, 80], ids=lambda window: f"window {window}")
@pytest.mark.parametrize("size", [3, 16, 36])
def test_attention(heads, window, size):
    lengths = [150, 1, 0, 33, 64]
    q, k, v = (torch.randn(sum(lengths), n, size) for n in (heads[0], heads[1], heads[1]))
    layout = Layout(lengths)
    same(
        lambda *a: OPS.attend(*a, AttentionCall(layout, None, 0.2, window)),
        lambda *a: reference.attend(*a, AttentionCall(layout, None, 0.2, window)),
        (q, k, v),
    )
    with torch.no_grad():
        served = OPS.attend(q, k, v, AttentionCall(layout, None, 0.2, window))
    assert torch.equal(served, OPS.attend(q.requires_grad_(), k, v, AttentionCall(layout, None, 0.2, window)).detach())


def test_the_number_of_threads_does_not_change_gradients():
    x, weight = torch.randn(500, 64), torch.randn(64)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(gradients(lambda *a: OPS.rms_norm(*a, 1e-5), (x, weight))[1])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_views_and_kept_gradients():
    """Gradients that come in as views, and inputs that lie apart in memory."""
    x = torch.randn(6, 32, requires_grad=True)
    OPS.gated(x[:, 8:24], "silu").expand(2, 6, 8).sum().backward()
    y = x.detach().clone().requires_grad_()
    (reference.gated(y[:, 8:24], "silu") * 2).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
