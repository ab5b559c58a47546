"""A forward on a device that runs behind the host: it is stopped where the device is, and timed by the device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from moesaic.serve.core import device_timing
from moesaic.serve.core.device_timing import HostTimer
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from tests.serve.tiny import LayerClock, serve_all, tiny_model

LAUNCH = 0.001  # seconds of the host for a layer, whatever it takes the device
LAYERS = 12


class QueuedClock(LayerClock):
    """The host's clock beside a device: layers are launched at once and done one after the other."""

    device = 0.0  # when all that was launched is done

    def _layer(self, layer, given, out) -> None:
        self.advance(LAUNCH)
        self.device = max(self.device, self.now) + self.layer_seconds(len(given[0]))


@dataclass
class QueueMark:
    clock: QueuedClock
    at: float

    def wait(self) -> None:
        if self.at > self.clock.now:
            self.clock.advance(self.at - self.clock.now)

    def seconds_since(self, earlier) -> float:
        return self.at - earlier.at


@dataclass
class QueueTimer:
    clock: QueuedClock

    def mark(self) -> QueueMark:
        return QueueMark(self.clock, max(self.clock.device, self.clock.now))


def serve(policy, timed: bool = True):
    """After some prompts from which times are learned a long one, and in the midst of it a short one that is urgent."""
    model = tiny_model(layers=LAYERS)
    clock = QueuedClock(model, base=0.002, per_token=0.0005)
    engine = Engine(model, policy=policy, clock=clock)
    engine.runner.timer = QueueTimer(clock) if timed else HostTimer(clock)
    sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
    for tokens in (150, 80, 4):
        serve_all(engine, [engine.request([3 + n % 90 for n in range(tokens)], sampling, arrived=clock.now)])
    start, whole = clock.now, LAYERS * clock.layer_seconds(200)
    long = engine.request([5 + n % 90 for n in range(200)], sampling, arrived=start)
    arrives = start + 0.3 * whole
    short = engine.request([7, 8, 9], sampling, arrived=arrives, deadline=arrives + 0.5 * whole)
    engine.add(long)
    clock.at(arrives, lambda: engine.submit(short))
    clock.run(engine)
    return long, short, whole, clock


def test_a_forward_gives_way_where_the_device_is():
    long, short, whole, clock = serve(FlowPrefill())
    layer = clock.layer_seconds(200)
    assert short.first_token - short.arrived < (device_timing.AHEAD + 2) * layer < 0.5 * whole
    assert short.first_token <= short.deadline
    assert whole <= long.first_token - long.arrived < 1.2 * whole  # nothing was computed twice


def test_without_a_bound_there_is_nothing_left_to_stop(monkeypatch: pytest.MonkeyPatch):
    """The ablation: all layers are launched before the short prompt arrives."""
    monkeypatch.setattr(device_timing, "AHEAD", LAYERS + 1)
    _, short, whole, _ = serve(FlowPrefill())
    assert short.first_token - short.arrived > 0.6 * whole


def test_seconds_are_the_devices():
    by_device, by_launch = FlowPrefill(), FlowPrefill()
    _, _, whole, clock = serve(by_device)
    serve(by_launch, timed=False)
    assert by_device.prefill.seconds([(200, 0)]) == pytest.approx(whole, rel=0.1)
    assert by_launch.prefill.seconds([(200, 0)]) < 0.1 * whole  # what the host took to launch it


def test_a_policy_that_never_stops_a_forward_launches_it_whole():
    model = tiny_model(layers=LAYERS)
    clock = QueuedClock(model, base=0.002, per_token=0.0005)
    engine = Engine(model, policy=Chunked(), clock=clock)
    engine.runner.timer = QueueTimer(clock)
    waits = []
    QueueMark.wait, wait = lambda self: waits.append(self.at) or wait(self), QueueMark.wait
    try:
        engine.generate([[5, 6, 7]], max_tokens=2, temperature=0.0, ignore_eos=True)
    finally:
        QueueMark.wait = wait
    assert len(waits) == engine.counts.steps
