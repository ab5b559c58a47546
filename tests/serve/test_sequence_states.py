"""Serving models whose layers keep a state of each sequence: the same bits however a request is run, and refusals."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.serve.core.beams import BeamOptions, beam_search
from moesaic.serve.core.context_windows import joined
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kept_states import StatefulPagePool
from moesaic.serve.core.kv_policies.snapkv import SnapKV
from moesaic.serve.core.memory import KEPT, page_bytes
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from moesaic.serve.core.stats import EngineStats
from moesaic.serve.group.shares import check as check_layout
from moesaic.serve.pages.outside import TierOptions
from tests.model import oracle
from tests.serve.tiny import LayerClock

SIZE, WRITTEN = 4, 9
# Prompts that end before, at and behind chunks of 64 tokens, and that share their beginning.
PROMPTS = [[3 + (7 * i + i * i // 5) % 90 for i in range(length)] for length in (70, 5, 64, 1, 33, 70)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("states") / "model"
    oracle.save("qwen3_next", path, max_position_embeddings=128)
    return path


@pytest.fixture(scope="module", params=["invariant", "fast"])
def model(request, stored: Path) -> Model:
    return moesaic.load(stored, threads=1, mode=request.param)


Answers = list[tuple[list[int], list[float]]]


def answers(engine: Engine, prompts: list[list[int]]) -> Answers:
    found = engine.generate(prompts, max_tokens=WRITTEN, seed=3, logprobs=1, ignore_eos=True)
    return [(one.tokens, [entry.logprob for entry in one.logprobs]) for one in found]


def places(engine: Engine) -> list[int]:
    """Of states that no request has: none is lost, none there twice."""
    pool = engine.page_pool
    assert isinstance(pool, StatefulPagePool)
    return sorted([*pool.free_states, *pool.kept.values()])


@pytest.fixture(scope="module")
def alone(model: Model) -> Answers:
    return [answers(Engine(model, page_size=SIZE), [prompt])[0] for prompt in PROMPTS]


def test_alone_as_in_a_batch_and_in_chunks(model: Model, alone: Answers) -> None:
    engine = Engine(model, page_size=SIZE)
    assert answers(engine, PROMPTS) == alone
    assert answers(engine, PROMPTS[::-1]) == alone[::-1]  # in places where other sequences have been
    assert answers(Engine(model, page_size=SIZE, policy=Chunked(tokens=7)), PROMPTS) == alone
    stats = EngineStats.of(engine)
    assert stats.states == 64 + KEPT and stats.states_in_use == stats.pages_in_use == 0


def test_after_preemption(model: Model, alone: Answers) -> None:
    engine = Engine(model, page_size=SIZE, cache_bytes=11 * model.state_bytes, reuse_prefixes=False)
    assert engine.scheduler.max_requests == 5 and engine.cache.pages < sum(len(prompt) // SIZE for prompt in PROMPTS)
    assert answers(engine, PROMPTS) == alone
    assert engine.scheduler.preemptions > 0 and places(engine) == [0, 1, 2, 3, 4]


def test_an_aborted_request_gives_its_place_back(model: Model, alone: Answers) -> None:
    engine = Engine(model, page_size=SIZE, max_requests=2, policy=Chunked(tokens=16))
    request = engine.request(PROMPTS[0])
    engine.submit(request)
    engine.step()
    assert request.state is not None and request.computed == 16
    engine.abort(request)
    assert request.state is None and places(engine) == [*range(2 + KEPT)]
    assert answers(engine, PROMPTS) == alone  # never more than two at once


def test_a_pass_that_stops_between_layers_goes_on_where_it_was(model: Model, alone: Answers) -> None:
    """Another request has its own pass meanwhile; and one that is given up begins anew."""
    policy = FlowPrefill()
    for new in (1, 8, 32, 128):
        policy.prefill.observe([(new, 0)], 4 * (0.001 + 0.001 * new))
        policy.decode.observe([(1, 0)] * (new % 7), 4 * (0.001 + 0.001 * (new % 7)))
    clock = LayerClock(model)
    engine = Engine(model, page_size=SIZE, policy=policy, clock=clock, reuse_prefixes=False)  # they begin alike
    sampling = Sampling(max_tokens=WRITTEN, seed=3, logprobs=1, ignore_eos=True)
    requests = [engine.request(prompt, sampling) for prompt in PROMPTS[:2]]
    for request, when in zip(requests, (0.0, 0.1), strict=True):
        request.arrived = when
        clock.at(when, partial(engine.submit, request))
    clock.at(0.2, lambda: engine.call(engine.weights_changed))  # in the long one's pass, to the same weights
    clock.run(engine)
    long, short = requests
    assert short.first_token < long.first_token and long.versions == [1] * WRITTEN
    found = [(one.tokens[len(one.prompt) :], [entry.logprob for entry in one.logprobs]) for one in requests]
    assert found == alone[:2]
    assert not engine.page_pool.in_use and places(engine) == [*range(64)]


def test_the_trainer_has_the_engines_bits(stored: Path) -> None:
    model = moesaic.load(stored, threads=1, mode="invariant")
    found = answers(Engine(model, page_size=SIZE, policy=Chunked(tokens=11)), PROMPTS)
    sequences = [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, found, strict=True)]
    hidden_TD = model(
        torch.tensor([token for tokens in sequences for token in tokens]),
        layout := Layout([len(tokens) for tokens in sequences]),
    )
    assert hidden_TD.requires_grad
    for span, tokens, prompt, (_, logprobs) in zip(layout.spans, sequences, PROMPTS, found, strict=True):
        rows = slice(span.start + len(prompt) - 1, span.stop - 1)
        own, _ = model.token_logprobs(hidden_TD[rows], torch.tensor(tokens[len(prompt) :]))
        assert own.tolist() == logprobs


def test_states_are_counted_in_memory(model: Model) -> None:
    page = page_bytes(model, SIZE, torch.float32)
    engine = Engine(model, page_size=SIZE, cache_bytes=9 * model.state_bytes)
    assert engine.scheduler.max_requests == 4  # half of the memory is left for pages
    assert engine.cache.states is not None and engine.cache.states.bytes == 4 * model.state_bytes
    assert engine.cache.pages == 5 * model.state_bytes // page
    with pytest.raises(UserError, match="does not hold the state of a sequence"):
        Engine(model, page_size=SIZE, cache_bytes=model.state_bytes)
    half = Engine(model, page_size=SIZE, cache_dtype="float8")
    assert half.cache.states is not None and half.cache.states.layers[0]["state"].dtype == torch.float32


def windows(engine: Engine) -> None:
    prompt, given = joined([[5, 6, 7], [8, 9]], [10])
    engine.request(prompt, windows=given)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda model, path: Engine(model, drafter=Suffix()), "--drafter.*rejected draft token"),
        (lambda model, path: Engine(model, kv_policy=SnapKV()), "--kv-policy.*no policy prunes"),
        (
            lambda model, path: Engine(model, tiers=TierOptions(host_bytes=1 << 20)),
            "--cache-host-gb.*pages say nothing",
        ),
        (lambda model, path: Engine(model, tiers=TierOptions(travel=True)), "--prefill"),
        (lambda model, path: windows(Engine(model)), "parallel_contexts.*one text"),
        (lambda model, path: beam_search(Engine(model), [5, 6], BeamOptions(2)), "use_beam_search.*their beginning"),
        (lambda model, path: DraftModel(str(path)).start(Engine(model)), "cannot be taken out"),
        (lambda model, path: check_layout(model.config, ParallelLayout(tp=2)), "state of each sequence.*one device"),
        (
            lambda model, path: check_layout(model.config, ParallelLayout(dp=2)),
            "the rank that has the sequence's pages",
        ),
    ],
    ids=["drafter", "policy", "tiers", "disaggregation", "windows", "beams", "draft model", "ranks", "data ranks"],
)
def test_what_a_state_does_not_allow_is_refused_by_name(model: Model, stored: Path, refused, words: str) -> None:
    with pytest.raises(UserError) as error:
        refused(model, stored)
    assert re.search(words, str(error.value), re.DOTALL), str(error.value)
