"""An engine whose clock is governed, in a time that passes as its clock says."""

from __future__ import annotations

import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.cluster.frequency_routing import FrequencyRouting
from moesaic.serve.cluster.messages import EngineOptions, Ready
from moesaic.serve.cluster.worker import WorkerHandle
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.stats import EngineStats
from moesaic.serve.energy.control import Slo
from moesaic.serve.energy.governor import FrequencyOptions, Governor
from tests.serve.tiny import LayerClock, tiny_model

LEVELS = (500.0, 750.0, 1000.0, 1250.0, 1500.0, 2000.0)


class FakeClocks:
    """Writes down what is set; and time passes more slowly the lower the clock."""

    def __init__(self, time: LayerClock) -> None:
        self.levels, self.time, self.held = LEVELS, time, list[float]()
        self.base, self.per_token = time.base, time.per_token
        self.closed = False

    def set(self, clock: float) -> bool:
        self.held.append(clock)
        self.time.base = self.base * LEVELS[-1] / clock
        self.time.per_token = self.per_token * LEVELS[-1] / clock
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def governed(model: Model, slo: Slo, fixed: float | None = None) -> tuple[Engine, LayerClock, FakeClocks]:
    """Two layers: a step takes 10 ms and half of one for each token, at the highest clock."""
    time = LayerClock(model, base=0.005, per_token=0.00025)
    engine = Engine(model, clock=time)
    clocks = FakeClocks(time)
    engine.governor = Governor(engine, FrequencyOptions(slo, fixed), clocks)
    return engine, time, clocks


def ask(engine: Engine, time: LayerClock, count: int, tokens: int) -> list[Any]:
    """So many requests, all there now."""
    requests = [
        engine.request([5 + number, 6, 7, 8], Sampling(max_tokens=tokens, ignore_eos=True, seed=number), arrived=time())
        for number in range(count)
    ]
    for request in requests:
        engine.add(request)
    return requests


def tpot(request: Any) -> float:
    return (request.last_token - request.first_token) / (len(request.tokens) - len(request.prompt) - 1)


def test_decode_comes_down_to_its_slo_and_not_beyond(model: Model):
    engine, time, clocks = governed(model, Slo(ttft=1.0, tpot=0.03))
    requests = ask(engine, time, 4, 150)
    time.run(engine)
    assert all(tpot(request) <= 0.03 for request in requests)
    steps = [clock for clock in clocks.held if clock > LEVELS[0]]
    assert clocks.held[0] == 2000.0 and steps == sorted(steps, reverse=True)  # only ever down
    assert clocks.held[-1] == 1000.0  # 24 ms at half the clock; three eighths would take 32
    assert engine.governor is not None
    engine.governor.rest(engine)
    assert clocks.held[-1] == LEVELS[0]
    engine.governor.close()
    assert clocks.closed


def test_the_tokens_are_the_same(model: Model):
    engine, time, _ = governed(model, Slo(1.0, 0.03))
    requests = ask(engine, time, 3, 60)
    time.run(engine)
    plain = Engine(model)
    others = ask(plain, time, 3, 60)
    while plain.working:
        plain.step()
    assert [one.tokens for one in requests] == [one.tokens for one in others]


def test_prompts_are_in_time_though_the_clock_was_low(model: Model):
    engine, time, clocks = governed(model, Slo(ttft=0.2, tpot=0.05))
    ask(engine, time, 2, 200)
    late = []

    def more() -> None:
        late.append(engine.request([9] * 120, Sampling(max_tokens=2, ignore_eos=True), arrived=time()))
        engine.add(late[-1])

    for number in range(8):
        time.at(1.0 + 0.5 * number, more)
    time.run(engine)
    low = min(clock for clock in clocks.held)
    assert low < 2000.0
    assert all(request.first_token - request.arrived <= 0.2 for request in late)
    ups = sum(later > earlier for earlier, later in pairwise(clocks.held))
    assert 0 < ups <= 10  # for prompts, and back


def test_a_fixed_clock_is_held(model: Model):
    engine, time, clocks = governed(model, Slo(1.0, 1.0), fixed=1240.0)
    ask(engine, time, 2, 30)
    time.run(engine)
    assert clocks.held == [1250.0]


def test_without_a_gpu_it_is_said_once(model: Model, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "moesaic.serve"):
        engine = Engine(model, frequency=FrequencyOptions(Slo(1.0, 0.03)))
        engine.generate([[5, 6, 7]], max_tokens=4)
    assert engine.governor is None
    assert [record.getMessage() for record in caplog.records] == [
        "--frequency: the model is on a cpu, which sets its own clock; clocks are left as they are"
    ]


def test_as_the_command_line_says_it():
    assert FrequencyOptions.parse(None, None, None) is None
    assert FrequencyOptions.parse("auto", 500, 40) == FrequencyOptions(Slo(0.5, 0.04))
    assert FrequencyOptions.parse("1200", None, None) == FrequencyOptions(Slo(1.0, 0.05), fixed=1200.0)
    for wrong in (("fast", None, None), ("-3", None, None), (None, 500, None)):
        with pytest.raises(UserError):
            FrequencyOptions.parse(*wrong)


def test_workers_say_how_much_room_they_have(model: Model):
    engine, time, _ = governed(model, Slo(1.0, 0.03))
    ask(engine, time, 6, 30)  # what one more costs is known only where there were more, or fewer
    ask(engine, time, 2, 120)
    for _ in range(110):
        engine.step()
    stats = EngineStats.of(engine)
    assert stats.clock_mhz == 1000.0
    # A step takes 20 ms and one for each request at this clock, and may take 27; half of that at the highest.
    assert 3 <= stats.room_same_clock <= 5
    assert 20 <= stats.room_in_time <= 32
    total = stats + stats
    assert total.room_in_time == 2 * stats.room_in_time


def handle(number: int, clock: float, same: int, in_time: int, open_: int) -> WorkerHandle:
    stats = EngineStats(running=open_, clock_mhz=clock, room_same_clock=same, room_in_time=in_time)
    worker = WorkerHandle(number, EngineOptions("nowhere"), stats=stats, ready=Ready(100, 16))  # type: ignore[arg-type]
    worker.open = dict.fromkeys(range(open_))  # type: ignore[assignment]
    return worker


def test_requests_go_where_no_clock_rises(model: Model):
    engine = Engine(model)
    entry: Any = SimpleNamespace(request=engine.request([5] * 40))
    routing = FrequencyRouting()

    def chosen(*workers: WorkerHandle) -> int:
        visit = routing.choose(entry, workers)
        assert visit is not None
        return visit.worker.number

    # One at its limit, one with room, one idle: the idle one may stay so.
    assert chosen(handle(0, 1500, 0, 20, 8), handle(1, 750, 3, 30, 4), handle(2, 500, 9, 40, 0)) == 1
    # What was sent since the stats were read counts.
    full = handle(1, 750, 3, 30, 4)
    full.open = dict.fromkeys(range(7))  # type: ignore[assignment]
    assert chosen(handle(0, 1500, 0, 20, 8), full, handle(2, 500, 9, 40, 0)) == 2
    # Nobody has room below its next step: the lowest clock.
    assert chosen(handle(0, 1500, 0, 20, 8), handle(1, 750, 0, 30, 9)) == 1
    # Clocks that nobody controls: as always.
    assert chosen(handle(0, 0, 0, 0, 0), handle(1, 0, 0, 0, 0)) == 0
