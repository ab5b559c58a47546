"""The fused output matrix and cross-entropy against PyTorch's own, loss and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.kernels.cross_entropy import IGNORED, linear_cross_entropy


def inputs(tokens: int = 37, hidden: int = 12, vocab: int = 29):
    generator = torch.Generator().manual_seed(tokens)
    hidden_TD = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
    weight_VD = torch.randn(vocab, hidden, generator=generator, requires_grad=True)
    targets_T = torch.randint(0, vocab, (tokens,), generator=generator)
    targets_T[::5] = IGNORED
    scale_T = torch.rand(tokens, generator=generator)
    return hidden_TD, weight_VD, targets_T, scale_T


@pytest.mark.parametrize("rows", [1, 8, 1000])
@pytest.mark.parametrize("cap", [0.0, 4.0])
def test_loss_and_gradients(rows, cap):
    hidden_TD, weight_VD, targets_T, scale_T = inputs()
    total, losses_T = linear_cross_entropy(hidden_TD, weight_VD, targets_T, scale_T, cap=cap, rows=rows)
    (3 * total).backward()
    got = total, hidden_TD.grad, weight_VD.grad
    hidden_TD.grad = weight_VD.grad = None
    logits_TV = F.linear(hidden_TD, weight_VD)
    logits_TV = torch.tanh(logits_TV / cap) * cap if cap else logits_TV
    plain_T = F.cross_entropy(logits_TV, targets_T, reduction="none", ignore_index=IGNORED)
    expected = (plain_T * scale_T).sum()
    (3 * expected).backward()
    torch.testing.assert_close(losses_T, plain_T)
    for ours, theirs in zip(got, (expected, hidden_TD.grad, weight_VD.grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [64, 1 << 14, 1 << 22])  # of the whole batch, of which these are a part
@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_gradients_of_a_large_batch_in_half_precision(kind, tokens):
    hidden_TD, weight_VD, targets_T, _ = inputs(tokens=64, hidden=32, vocab=200)
    scale_T = torch.full((64,), 1 / tokens)

    def gradients(kind):
        hidden, weight = (tensor.detach().half().to(kind).requires_grad_() for tensor in (hidden_TD, weight_VD))
        total, _ = linear_cross_entropy(hidden, weight, targets_T, scale_T, rows=24)
        (total.float() * 2.0**16).backward()  # as a loss scale does
        return hidden.grad.float(), weight.grad.float()

    for ours, exact in zip(gradients(kind), gradients(torch.float32), strict=True):
        assert (ours - exact).norm() < 2 * torch.finfo(kind).eps * exact.norm()


def test_all_ignored_is_zero_and_has_zero_gradient():
    hidden_TD, weight_VD, targets_T, scale_T = inputs()
    total, losses_T = linear_cross_entropy(hidden_TD, weight_VD, torch.full_like(targets_T, IGNORED), scale_T)
    total.backward()
    assert total.item() == 0 and not losses_T.any() and not hidden_TD.grad.any() and not weight_VD.grad.any()


def test_logits_are_never_whole():
    """With eight rows at a time no tensor of all tokens times the vocabulary is ever made."""
    hidden_TD, weight_VD, targets_T, scale_T = inputs(tokens=64, hidden=8, vocab=512)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 512:
                largest = max(largest, out.shape[0])
            return out

    with Sizes():
        linear_cross_entropy(hidden_TD, weight_VD, targets_T, scale_T, rows=8)[0].backward()
    assert largest == 8


def test_without_gradients_nothing_is_kept():
    hidden_TD, weight_VD, targets_T, scale_T = inputs()
    with torch.no_grad():
        total, _ = linear_cross_entropy(hidden_TD, weight_VD, targets_T, scale_T)
    assert not total.requires_grad
