"""What else goes on in an engine, with offloaded weights: forwards that stop between layers, adapters, draft tokens."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.model.layout import Layout
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.offload.loading import load_served
from tests.serve.offload.models import mixture

OFFLOADS = {
    "experts": {"offload": "experts", "expert_cache_bytes": 10 * 3 * 32 * 32 * 4},
    "few experts": {"offload": "experts", "expert_cache_bytes": 4 * 3 * 32 * 32 * 4},
    "weights": {"offload": "weights"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("mixture"), layers=5)


def interleaved(model):
    """One forward stops after each layer count in turn, and another runs through between."""
    out = []
    with torch.inference_mode():
        for stop in range(1, 5):
            x_TD, context = model.begin(torch.arange(9), Layout([9]))
            for layer in range(stop):
                x_TD, _ = model.advance(x_TD, context, layer)
            out.append(model(torch.arange(3, 40), Layout([20, 17])))
            for layer in range(stop, 5):
                x_TD, _ = model.advance(x_TD, context, layer)
            out.append(model.finish(x_TD, context))
    return out


@pytest.mark.parametrize("kind", OFFLOADS)
def test_forwards_that_stop_between_layers(directory, kind):
    wanted = interleaved(moesaic.load(directory, threads=1))
    assert all(map(torch.equal, interleaved(load_served(directory, threads=1, **OFFLOADS[kind])), wanted))


@pytest.mark.parametrize("kind", OFFLOADS)
def test_draft_tokens(directory, kind):
    def answers(model):
        engine = Engine(model, cache_bytes=1 << 22, drafter=Suffix(), seed=2)
        done = engine.generate([[1, 2, 3] * 6, [9, 8, 7, 9, 8, 7, 9]], max_tokens=16, temperature=0.0)
        return [(list(one.tokens), [entry.logprob for entry in one.logprobs]) for one in done]

    assert answers(load_served(directory, threads=1, **OFFLOADS[kind])) == answers(moesaic.load(directory, threads=1))
