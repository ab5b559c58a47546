"""Layers streamed through two buffers: the same bits as all in memory."""

from __future__ import annotations

import pytest

import moesaic
from moesaic.serve.offload.loading import load_served
from tests.serve.offload.models import answers, latent_mixture, mixture


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("home", ["disk", "host"])
def test_tokens_and_bits_are_those_of_all_in_memory(tmp_path, layers, dtype, home):
    directory = mixture(tmp_path / "model", layers)
    model = load_served(directory, offload="weights", offload_from=home, dtype=dtype, threads=1)
    whole = moesaic.load(directory, dtype=dtype, threads=1)
    for sampling in ({}, {"temperature": 0.9, "seed": 5}):
        assert answers(model, **sampling) == answers(whole, **sampling)


def test_latent_attention_and_a_balance_bias(tmp_path):
    directory = latent_mixture(tmp_path / "model")
    model = load_served(directory, offload="weights", threads=1)
    assert answers(model) == answers(moesaic.load(directory, threads=1))
