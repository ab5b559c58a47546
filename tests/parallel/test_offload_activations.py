"""Activations on the host: same gradients, to the bit, and none of the large ones left with autograd."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from moesaic.model.layout import Layout
from moesaic.model.transformer import Model, run_plainly
from moesaic.parallel.offload.activations import ActivationOffload, saved_activations
from moesaic.recipe_offload import OffloadSection
from moesaic.train.layer_runners.recompute import recompute
from tests.parallel.test_seams import model_of


def gradients(offload: ActivationOffload | None, recomputed: bool) -> dict[str, Tensor]:
    model: Model = model_of()
    tokens_T = torch.randint(0, 67, (24,), generator=torch.Generator().manual_seed(0))
    runner = recompute if recomputed else run_plainly
    if offload is not None:
        offload.model = model
    with offload or saved_activations(None, model):
        hidden_TD = model(tokens_T, Layout([10, 14]), runner=runner)
        loss, _ = model.cross_entropy(hidden_TD, tokens_T.roll(-1), torch.full((24,), 1 / 24))
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_the_same(recomputed: bool) -> None:
    expected = gradients(None, recomputed)
    offload = ActivationOffload(model_of(), smallest=1)
    found = gradients(offload, recomputed)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert offload.bytes > 0


def test_recomputing_saves_less() -> None:
    sizes = []
    for recomputed in (False, True):
        offload = ActivationOffload(model_of(), smallest=1)
        gradients(offload, recomputed)
        sizes.append(offload.bytes)
    assert sizes[1] < sizes[0] / 2


def test_what_travels() -> None:
    """Each activation once, however many operations saved it; never a parameter; views and odd strides as they were."""
    layer = nn.Linear(64, 64)
    offload = ActivationOffload(layer, smallest=64)
    x = torch.randn(32, 64, requires_grad=True)
    with offload:
        y = layer(x)
        loss = (y * y).sum() + (y.t() @ y).sum() + (y.expand(2, 32, 64) * 2).sum() + y[::2].square().sum()
    size = 32 * 64 * 4
    assert offload.bytes == 3 * size  # x, y and its transpose; every second row is not a block of memory
    expected_x = x.detach().clone().requires_grad_()
    y = layer(expected_x)
    expected = (y * y).sum() + (y.t() @ y).sum() + (y.expand(2, 32, 64) * 2).sum() + y[::2].square().sum()
    loss.backward()
    expected.backward()
    assert torch.equal(x.grad, expected_x.grad)  # type: ignore[arg-type]


def test_memory_is_given_up() -> None:
    """Autograd keeps the copy, so that the activation itself is free once the forward pass lets go of it."""
    layer = nn.Linear(8, 8)
    offload = ActivationOffload(layer, smallest=1)
    x = torch.randn(4, 8)
    with offload:
        hidden = layer(x)
        out = hidden.square().sum()
    address = torch.multiprocessing.reductions.StorageWeakRef(hidden.untyped_storage())  # type: ignore[attr-defined]
    del hidden
    gc.collect()
    assert address.expired()
    out.backward()
    assert layer.weight.grad is not None


def test_a_recipe_turns_it_on() -> None:
    model = model_of()
    assert isinstance(saved_activations(OffloadSection(activations=True), model), ActivationOffload)
    assert not isinstance(saved_activations(OffloadSection(), model), ActivationOffload)
