"""Whom the policies serve first, on a clock that only layers move; and that no cache is too small to go on."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies import SchedulingPolicy
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill, Job, split_late
from moesaic.serve.core.ttft_predictor import TTFTPredictor
from tests.matrix import SCHEDULING_POLICIES
from tests.serve.tiny import LayerClock, page_bytes, tiny_model

LAYERS = 6


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=LAYERS)


def greedy(tokens: int = 1) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 101, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def taught(**options: float) -> FlowPrefill:
    """A policy that knows how long passes on a `LayerClock` take."""
    flow = FlowPrefill(**options)
    for new in (1, 8, 32, 128):
        for cached in (0, 64):
            flow.prefill.observe([(new, cached)], LAYERS * (0.001 + 0.001 * new))
            flow.decode.observe([(1, cached)] * (new % 7), LAYERS * (0.001 + 0.001 * (new % 7)))
    return flow


def arriving(engine: Engine, clock: LayerClock, when: float, length: int, **options) -> Request:
    """A request that comes at a time, due so many seconds later."""
    due = options.pop("due", None)
    tokens = options.pop("tokens", 1)
    request = engine.request(prompt(length, seed=length), greedy(tokens), **options)
    request.arrived = when
    request.deadline = when + due if due is not None else None
    clock.at(when, lambda: engine.submit(request))
    return request


# The predictor


def test_the_predictor_finds_the_terms_of_passes_that_follow_the_law():
    predictor = TTFTPredictor()
    rng = random.Random(0)
    for _ in range(40):
        new, cached = rng.randint(1, 2000), rng.randint(0, 4000)
        predictor.observe([(new, cached)], 0.01 + 2e-3 * new + 3e-7 * new * (cached + new / 2))
    assert predictor.terms == pytest.approx([0.01, 2e-3, 3e-7], rel=1e-4)
    both = predictor.seconds([(100, 0), (50, 1000)])
    assert both == pytest.approx(0.01 + 2e-3 * 150 + 3e-7 * (100 * 50 + 50 * 1025), rel=1e-4)


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000), st.floats(1e-4, 10.0)), min_size=1, max_size=30))
@settings(max_examples=50)
def test_the_fit_is_the_non_negative_least_squares_of_scipy(passes):
    predictor = TTFTPredictor()
    rows, weight = [], 1.0
    for new, cached, seconds in reversed(passes):
        rows.append(weight * np.array([1, new, new * (cached + new / 2)]) / seconds)
        weight *= 0.95**0.5
    for new, cached, seconds in passes:
        predictor.observe([(new, cached)], seconds)
    weights = np.array([0.95 ** (0.5 * i) for i in range(len(passes))])
    rows_N3 = np.array(rows)
    scale = np.linalg.norm(rows_N3, axis=0)
    _, residual = scipy.optimize.nnls(rows_N3 / scale, weights)
    ours = np.linalg.norm(rows_N3 @ predictor.terms - weights)
    assert (predictor.terms >= 0).all()
    assert ours**2 <= residual**2 + 1e-4 * np.linalg.norm(weights) ** 2


def test_the_predictor_follows_a_machine_that_becomes_slower():
    predictor = TTFTPredictor()
    for speed in (1.0, 3.0):
        for i in range(200):
            length = 50 + 37 * i % 200
            predictor.observe([(length, 0)], speed * (0.01 + 1e-3 * length))
    assert predictor.seconds([(100, 0)]) == pytest.approx(0.33, rel=0.05)


# The order


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), max_size=7))
def test_as_many_jobs_as_possible_are_in_time(sizes):
    jobs = [Job(Request([1]), float(seconds), float(due), float(due), 0.0, 0) for seconds, due in sizes]
    in_time, late = split_late(jobs, 0.0)
    assert Counter(map(id, in_time + late)) == Counter(map(id, jobs))

    def fits(chosen: list[Job]) -> bool:
        end = 0.0
        for job in sorted(chosen, key=lambda job: job.latest):
            end += job.seconds
            if end > job.latest:
                return False
        return True

    subsets = [[job for i, job in enumerate(jobs) if mask >> i & 1] for mask in range(2 ** len(jobs))]
    assert fits(in_time)
    assert len(in_time) == max(len(subset) for subset in subsets if fits(subset))


def long_then_short(model, policy, due=(None, None)):
    """The clock and both requests, once served: a long prompt, and a short one that comes while it is read."""
    clock = LayerClock(model)
    engine = Engine(model, policy=policy, clock=clock)
    long = arriving(engine, clock, 0.0, 200, due=due[0])
    short = arriving(engine, clock, 0.25, 5, due=due[1])
    clock.run(engine)
    return clock, long, short


def test_a_short_prompt_waits_for_one_layer_of_a_long_one_and_nothing_is_computed_twice(model):
    clock, long, short = long_then_short(model, taught(), due=(10.0, 1.0))
    alone = LAYERS * clock.layer_seconds(5)
    assert short.first_token - short.arrived <= alone + clock.layer_seconds(200)
    assert long.first_token == pytest.approx(LAYERS * (clock.layer_seconds(200) + clock.layer_seconds(5)))


def test_a_short_prompt_waits_for_the_whole_chunk_where_prompts_are_read_in_chunks(model):
    _, long, short = long_then_short(model, Chunked(tokens=512), due=(10.0, 1.0))
    assert short.first_token > long.first_token


def test_without_deadlines_too_a_long_prompt_does_not_hold_up_a_short_one(model):
    _, long, short = long_then_short(model, taught())
    assert short.first_token < long.first_token


def test_a_later_deadline_does_not_interrupt(model):
    _, long, short = long_then_short(model, taught(), due=(2.0, 9.0))
    assert long.first_token < short.first_token


def test_decisions_are_taken_only_when_something_happens(model):
    class Counting(FlowPrefill):
        def choose(self, *given):
            asked.append(given[-1])
            return super().choose(*given)

    asked: list[float] = []
    clock = LayerClock(model)
    engine = Engine(model, policy=Counting(), clock=clock)
    arriving(engine, clock, 0.0, 200, due=10.0)
    clock.run(engine)
    assert len(asked) == 2  # when it began, and once when its pass was under way: not once for every layer
    asked.clear()
    clock = LayerClock(model)
    engine = Engine(model, policy=Counting(), clock=clock)
    arriving(engine, clock, 0.0, 200, due=10.0)
    arriving(engine, clock, 0.25, 100, due=20.0)
    clock.run(engine)
    assert len(asked) == 5  # two for each pass, and one for the arrival


def test_what_cannot_be_in_time_goes_last(model):
    clock = LayerClock(model)
    engine = Engine(model, policy=taught(), clock=clock)
    hopeless = arriving(engine, clock, 0.0, 200, due=0.1)
    fine = [arriving(engine, clock, 0.0, 60 + i, due=2.0 + i) for i in range(3)]
    clock.run(engine)
    assert all(request.first_token <= request.deadline for request in fine)
    assert hopeless.first_token > max(request.first_token for request in fine)
    # By deadline alone the hopeless one would go first, and three would be late for one that is late anyway.
    clock = LayerClock(model)
    engine = Engine(model, policy=Chunked(tokens=512), clock=clock)
    hopeless = arriving(engine, clock, 0.0, 200, due=0.1)
    fine = [arriving(engine, clock, 0.0, 60 + i, due=0.5 + 0.4 * i) for i in range(3)]
    clock.run(engine)
    assert any(request.first_token > request.deadline for request in fine)


@pytest.mark.parametrize(("patience", "last"), [(1000.0, True), (1.0, False)])
def test_nothing_goes_before_what_has_waited_too_long(model, patience, last):
    clock = LayerClock(model)
    engine = Engine(model, policy=taught(patience=patience, batch=0), clock=clock)
    hopeless = arriving(engine, clock, 0.0, 200, due=0.1)
    others = [arriving(engine, clock, 0.05 * i, 20, due=50.0) for i in range(100)]  # more than there is time for
    for i, request in enumerate(others):
        request.prompt = request.tokens = prompt(20, seed=1000 + i)
    clock.run(engine)
    assert (hopeless.first_token > max(request.first_token for request in others)) == last


def test_what_is_in_the_cache_already_takes_no_time(model):
    """A long prompt that was read before can still be in time, and is not put last as one that cannot."""
    for read_before in (True, False):
        clock = LayerClock(model)
        engine = Engine(model, policy=taught(), clock=clock)
        if read_before:
            arriving(engine, clock, 0.0, 200, due=10.0)
        again = arriving(engine, clock, 5.0, 200, due=0.4)
        other = arriving(engine, clock, 5.0, 100, due=2.0)
        clock.run(engine)
        assert (again.first_token < other.first_token) == read_before == (again.cached > 0)


def test_priority_comes_before_deadlines(model):
    clock = LayerClock(model)
    engine = Engine(model, policy=taught(), clock=clock)
    soon = arriving(engine, clock, 0.0, 50, due=1.0, priority=1)
    urgent = arriving(engine, clock, 0.1, 60, due=30.0, priority=0)
    clock.run(engine)
    assert urgent.first_token < soon.first_token


def test_answers_go_on_in_their_rhythm_while_a_long_prompt_is_read(model):
    gaps = {}
    for name, policy in {"flow": taught(itl=0.3), "chunked": Chunked(tokens=512)}.items():
        clock = LayerClock(model)
        engine = Engine(model, policy=policy, clock=clock)
        times: list[float] = []
        engine_verify = engine._verify
        writing = arriving(engine, clock, 0.0, 4, tokens=40)

        def follow(share, *rest, follow=engine_verify, times=times, clock=clock, writing=writing):
            if share.request is writing:
                times.append(clock())
            return follow(share, *rest)

        engine._verify = follow
        arriving(engine, clock, 0.05, 230, due=5.0)
        arriving(engine, clock, 0.06, 231, due=9.0)
        clock.run(engine)
        assert len(times) == 40
        gaps[name] = max(after - before for before, after in itertools.pairwise(times))
    assert gaps["flow"] <= 0.3 + clock.layer_seconds(231)
    assert gaps["chunked"] > 2 * gaps["flow"]


def test_short_prompts_are_read_together_unless_that_makes_one_late(model):
    for due, batch, passes in [(5.0, 64, 1), (5.0, 20, 2), (5.0, 0, 4), (0.10, 64, 4)]:
        clock = LayerClock(model)
        engine = Engine(model, policy=taught(batch=batch), clock=clock)
        for i in range(4):
            request = engine.request(prompt(10, seed=i), greedy())
            request.arrived, request.deadline = 0.0, due + 0.07 * i
            engine.add(request)
        clock.run(engine)
        assert engine.counts.steps == passes, (due, batch)


def test_a_prompt_above_the_limit_takes_several_passes(model):
    whole = Engine(model, policy=FlowPrefill()).generate([prompt(100)], max_tokens=4, temperature=0.0)[0].tokens
    engine = Engine(model, policy=FlowPrefill(tokens=30))
    assert engine.generate([prompt(100)], max_tokens=4, temperature=0.0)[0].tokens == whole
    assert engine.counts.steps == 4 + 3


# Stopping


def test_a_stopped_pass_nobody_waits_for_is_dropped(model):
    clock = LayerClock(model)
    engine = Engine(model, policy=taught(), clock=clock)
    long = arriving(engine, clock, 0.0, 200, due=10.0)
    short = arriving(engine, clock, 0.25, 5, due=1.0, tokens=5)
    clock.at(0.42, lambda: engine.call(lambda: engine.abort(long)))
    clock.run(engine)
    assert long.finish_reason == "abort" and long.first_token is None
    assert short.written == 5
    assert clock.now < LAYERS * clock.layer_seconds(200)  # it was not finished first
    assert engine.page_pool.in_use == 0 and not engine.scheduler.stopped


def test_an_aborted_prompt_does_not_read_its_other_chunks(model):
    clock = LayerClock(model)
    engine = Engine(model, policy=Chunked(tokens=20), clock=clock)
    long = arriving(engine, clock, 0.0, 200)
    clock.at(0.05, lambda: engine.call(lambda: engine.abort(long)))
    clock.run(engine)
    assert clock.now < 3 * LAYERS * clock.layer_seconds(20)
    assert engine.page_pool.in_use == 0


@pytest.mark.parametrize("policy", [Chunked(tokens=64), FlowPrefill()], ids=["chunked", "flow"])
def test_a_pause_in_the_middle_of_a_pass_changes_nothing(model, policy):
    expected = Engine(model).generate([prompt(50)], max_tokens=6, temperature=0.0, ignore_eos=True)[0].tokens
    clock = LayerClock(model)
    engine = Engine(model, policy=policy, clock=clock)
    request = arriving(engine, clock, 0.0, 50, tokens=6)
    request.prompt = request.tokens = prompt(50)
    clock.at(0.08, lambda: engine.call(engine.pause))
    clock.at(5.0, lambda: engine.call(engine.resume))
    clock.run(engine)
    assert request.tokens[-6:] == expected
    assert clock.now > 5.0


def test_weights_that_change_in_the_middle_of_a_pass_begin_it_anew(model):
    other = tiny_model(layers=LAYERS, seed=1)
    expected = Engine(other).generate([prompt(50)], max_tokens=6, temperature=0.0, ignore_eos=True)[0].tokens
    changing = tiny_model(layers=LAYERS)
    clock = LayerClock(changing)
    engine = Engine(changing, clock=clock)

    def change() -> None:
        changing.load_state_dict(other.state_dict())
        engine.weights_changed()

    request = arriving(engine, clock, 0.0, 50, tokens=6)
    request.prompt, request.tokens = prompt(50), prompt(50)
    clock.at(0.12, lambda: engine.call(change))
    clock.run(engine)
    assert request.tokens[-6:] == expected != Engine(model).generate([prompt(50)], max_tokens=6, temperature=0.0)
    assert request.versions == [1] * 6
    assert engine.page_pool.in_use == 0


# Small caches


@pytest.mark.parametrize("kind", ["flow", "chunked"])
@pytest.mark.parametrize("seed", range(4))
def test_no_cache_is_too_small_to_go_on(model, kind, seed):
    rng = random.Random(seed)
    policy = (
        taught(itl=0.02, patience=rng.choice([0.5, 60.0])) if kind == "flow" else Chunked(tokens=rng.randint(8, 90))
    )
    pages = rng.choice([13, 16, 30])
    clock = LayerClock(model)
    engine = Engine(model, policy=policy, clock=clock, page_size=8, cache_bytes=pages * page_bytes(model, 8))
    requests = []
    for _ in range(40):
        length = rng.choice([3, 9, 20, 90])
        when = rng.uniform(0, 3.0)
        request = arriving(
            engine, clock, when, length, tokens=rng.randint(1, 12), due=rng.choice([0.05, 0.3, 3.0, None])
        )
        shared = prompt(length, seed=rng.randint(0, 3))
        request.prompt, request.tokens = shared, list(shared)
        requests.append(request)
        if rng.random() < 0.2:
            clock.at(when + rng.uniform(0, 1.0), lambda r=request: engine.call(lambda: engine.abort(r)))
    for when in (1.0, 2.0):
        clock.at(when, lambda: engine.call(engine.pause))
        clock.at(when + 0.2, lambda: engine.call(engine.resume))
    clock.run(engine)
    assert all(request.finish_reason in ("length", "abort") for request in requests)
    assert sum(request.finish_reason == "length" for request in requests) >= 30
    assert engine.page_pool.in_use == 0 and not engine.scheduler.stopped and not engine.scheduler.requests


def test_stopped_passes_that_hold_every_page_go_on(model):
    """Without this a short request that came between would wait for pages, and the pages for the request."""
    clock = LayerClock(model)
    engine = Engine(model, policy=taught(), clock=clock, page_size=8, cache_bytes=13 * page_bytes(model, 8))
    long = arriving(engine, clock, 0.0, 100, due=30.0, tokens=2)
    short = arriving(engine, clock, 0.15, 5, due=1.0, tokens=2)
    clock.run(engine)
    assert long.written == short.written == 2
    assert engine.page_pool.in_use == 0


# As a method


def test_policies_are_found_by_name_and_their_options_checked():
    for name, options in SCHEDULING_POLICIES.items():
        assert type(build(Method(name, options), SchedulingPolicy, "command line")).__module__.endswith(name)
    policy = build(Method("flow", {"itl": 0.05}), SchedulingPolicy, "command line")
    assert isinstance(policy, FlowPrefill) and policy.itl == 0.05
    with pytest.raises(UserError, match="itl"):
        build(Method("flow", {"itl": -1.0}), SchedulingPolicy, "command line")
    with pytest.raises(UserError, match="no such option"):
        build(Method("flow", {"prompts": None}), SchedulingPolicy, "command line")
    assert FlowPrefill().prefill is not FlowPrefill().prefill


def test_answers_go_on_before_chunks_of_prompts_however_urgent():
    def request(decoding, urgency, pending):
        return SimpleNamespace(decoding=decoding, urgency=urgency, pending=pending, scores_prompt=False)

    prompt, answer, later = request(False, 0, 100), request(True, 1, 1), request(False, 2, 100)
    plan = Chunked(tokens=48).plan([prompt, answer, later], True)
    assert [(one, count) for one, count in plan] == [(answer, 1), (prompt, 47)]
