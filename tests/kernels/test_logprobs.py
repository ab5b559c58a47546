"""Log-probabilities in pieces: values and gradients of the plain way."""

from __future__ import annotations

import pytest
import torch

from moesaic.kernels.cross_entropy import IGNORED
from moesaic.kernels.logprobs import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [3, 64])
def test_values_and_gradients_are_those_of_log_softmax(temperature, rows):
    hidden = torch.randn(17, 8, requires_grad=True)
    weight = torch.randn(29, 8, requires_grad=True)
    targets = torch.randint(0, 29, (17,))
    targets[[2, 11]] = IGNORED
    kept = targets != IGNORED
    found, entropy = token_logprobs(hidden, weight, targets, temperature=temperature, rows=rows)
    log = (hidden @ weight.T / temperature).log_softmax(-1)
    expected = log[torch.arange(17), targets.clamp(min=0)] * kept
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=log).entropy() * kept)

    factors = torch.randn(17)
    mine = torch.autograd.grad((found.exp() * factors).sum(), (hidden, weight))
    plain = torch.autograd.grad(((expected * kept).exp() * factors).sum(), (hidden, weight))
    for one, other in zip(mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_gradients_hold_in_double_precision():
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, IGNORED, 3, 6, 0])
    found, _ = token_logprobs(hidden, weight, targets, rows=2)
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    log = (hidden @ weight.T).log_softmax(-1)
    expected = torch.autograd.grad((log[torch.arange(5), targets.clamp(min=0)] * (targets != IGNORED)).sum(), hidden)[0]
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
