"""Experts that are fetched: whatever the cache holds, every token has the bits it has with all of them in memory."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.serve.offload.loading import load_served
from tests.serve.offload.models import answers, latent_mixture, mixture

BYTES = 3 * 32 * 32  # numbers of an expert of `mixture`
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def whole(directory):
    """Answers with everything in memory, by dtype, mode and whether sampled."""
    made = {}

    def of(dtype, mode, sampled):
        if (dtype, mode, sampled) not in made:
            model = moesaic.load(directory, dtype=dtype, mode=mode, threads=1)
            made[dtype, mode, sampled] = answers(model, **(SAMPLED if sampled else {}))
        return made[dtype, mode, sampled]

    return of


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("slots", [32, 20, 8, 5, 2])  # of 32 experts in four layers; a token has two in each
@pytest.mark.parametrize("dtype,mode", [("float32", "fast"), ("bfloat16", "fast"), ("float32", "invariant")])
def test_tokens_and_bits_are_those_of_all_in_memory(directory, whole, dtype, mode, slots, sampled):
    size = BYTES * getattr(torch, dtype).itemsize
    model = load_served(
        directory, offload="experts", expert_cache_bytes=slots * size, dtype=dtype, mode=mode, threads=1
    )
    assert answers(model, **(SAMPLED if sampled else {})) == whole(dtype, mode, sampled)
    counts = model.ops.counts
    held = {id(layer.slots): layer.slots for layer in model.ops.layers.values()}.values()
    assert sum(pool.cache.slots * pool.bytes for pool in held) <= slots * size
    assert counts.wanted == counts.hits + counts.misses > 0
    assert (counts.misses == 0) == (slots == 32)
    assert all(pin == 0 for pool in held for pin in pool.cache.pins)


@pytest.mark.parametrize("slots", [16, 6, 2])
def test_latent_attention_shared_experts_and_a_balance_bias(tmp_path, slots):
    directory = latent_mixture(tmp_path / "model")
    model = load_served(directory, offload="experts", expert_cache_bytes=slots * 3 * 16 * 32 * 4, threads=1)
    assert answers(model) == answers(moesaic.load(directory, threads=1))
    assert model.ops.counts.misses > 0 or slots == 16


def test_reference_kernels(directory, whole):
    model = load_served(directory, offload="experts", expert_cache_bytes=6 * BYTES * 4, mode="reference", threads=1)
    assert answers(model) == whole("float32", "reference", False)


def test_from_host_memory(directory, whole):
    model = load_served(directory, offload="experts", offload_from="host", expert_cache_bytes=8 * BYTES * 4, threads=1)
    assert answers(model) == whole("float32", "fast", False)


def test_less_than_one_tokens_experts_is_refused_with_what_is_needed(directory):
    with pytest.raises(UserError, match=r"--expert-cache-gb.*Give at least 2\.29e-05"):
        load_served(directory, offload="experts", expert_cache_bytes=BYTES * 4, threads=1)


def test_flags_that_do_not_go_together(directory, tmp_path):
    with pytest.raises(UserError, match="--expert-cache-gb"):
        load_served(directory, expert_cache_bytes=1 << 20)
    with pytest.raises(UserError, match="--expert-cache-gb"):
        load_served(directory, offload="weights", expert_cache_bytes=1 << 20)
    with pytest.raises(UserError, match="there is no"):
        load_served(directory, offload="heads")
