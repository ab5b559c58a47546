"""Samplers on a real GPU: requests that use them are sampled on the host beside a decode batch that overlaps, and give
the same bits alone, in company, with little memory and with draft tokens.

pytest tests/gpu/test_gpu_samplers.py
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device: these tests run on a GPU", allow_module_level=True)

import moesaic
from moesaic.serve.core.beams import BeamOptions, beam_search
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.gpu.decode_batch import samples_on_device
from moesaic.serve.gpu.overlap import OverlapLoop
from tests.gpu.models import tokens_of

DEVICE = "cuda"
LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
FREE = {"max_tokens": 24, "ignore_eos": True}
KINDS = [
    Sampling(temperature=0.0, **FREE),  # on the device, as the next
    Sampling(seed=1, temperature=0.9, **FREE),
    Sampling(seed=2, dry_multiplier=2.0, dry_allowed_length=1, dry_penalty_last_n=-1, **FREE),
    Sampling(seed=3, xtc_probability=0.5, xtc_threshold=0.002, **FREE),
    Sampling(seed=4, mirostat=1, mirostat_tau=3.0, mirostat_eta=0.5, **FREE),
    Sampling(seed=5, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5, **FREE),
    Sampling(seed=6, typical_p=0.6, temperature=0.8, **FREE),
    Sampling(seed=7, top_n_sigma=1.5, dynatemp_range=0.7, **FREE),
    Sampling(temperature=0.0, bad_words=((5,), (7, 9)), repetition_penalty=1.3, repeat_last_n=9, **FREE),
    Sampling(seed=8, allowed_tokens=frozenset(range(20, 60)), min_tokens=5, logit_bias={25: 2.0}, **FREE),
    Sampling(seed=9, samplers=LLAMA_CPP, top_k=50, top_p=0.9, typical_p=0.97, xtc_probability=0.2, **FREE),
]
PROMPTS = tokens_of(*(9 + 7 * n for n in range(len(KINDS))))


@pytest.fixture(scope="module")
def model(directories):
    return moesaic.load(directories["qwen3_moe"], dtype=torch.bfloat16, device=DEVICE)


def engine_of(model, **options):
    engine = Engine(model, **{"cache_bytes": 1 << 26, **options})
    assert isinstance(engine.runner, OverlapLoop), "steps overlap"
    return engine


def answers(engine):
    requests = [engine.request(prompt, kind) for prompt, kind in zip(PROMPTS, KINDS, strict=True)]
    engine.complete(requests)
    return [(request.tokens, [entry.logprob for entry in request.logprobs]) for request in requests]


@pytest.fixture(scope="module")
def alone(model):
    found = []
    for prompt, kind in zip(PROMPTS, KINDS, strict=True):
        engine = engine_of(model)
        request = engine.request(prompt, kind)
        engine.complete([request])
        found.append((request.tokens, [entry.logprob for entry in request.logprobs]))
    return found


def test_who_samples_where():
    assert [samples_on_device(kind) for kind in KINDS] == [True, True] + [False] * (len(KINDS) - 2)


def test_together_and_with_little_memory(model, alone):
    assert answers(engine_of(model)) == alone
    page = sum(slab[0].nbytes for layer in model.new_cache(1, 16).layers for slab in layer.values())
    small = engine_of(model, cache_bytes=24 * page, policy=Chunked(tokens=100))
    assert answers(small) == alone
    assert small.scheduler.preemptions > 0


def test_with_draft_tokens(model, alone):
    engine = engine_of(model, drafter=DraftRouter.over(Suffix(), always=True))
    for _ in range(2):
        assert answers(engine) == alone
    assert engine.counts.accepted_tokens > 0


def test_beams_beside_others_are_the_same(model):
    options, sampling = BeamOptions(4), Sampling(max_tokens=16, ignore_eos=True)
    first = beam_search(engine_of(model), PROMPTS[2], options, sampling)
    busy = engine_of(model)
    for prompt, kind in zip(PROMPTS, KINDS, strict=True):
        busy.add(busy.request(prompt, kind))
    second = beam_search(busy, PROMPTS[2], options, sampling)
    assert [one.beam.tokens for one in first] == [one.beam.tokens for one in second]
    assert [one.score for one in first] == pytest.approx([one.score for one in second], abs=1e-2)
    assert [one.score for one in first] == sorted([one.score for one in first], reverse=True)
