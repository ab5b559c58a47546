"""The seconds of a step's phases: counted once, in the innermost, and never more than the step."""

from __future__ import annotations

import threading

import pytest
import torch

import moesaic.phases as module
from moesaic.phases import PhaseClock, phase, phase_shares, phase_totals

CPU = torch.device("cpu")


@pytest.fixture
def now(monkeypatch):
    """A clock that is put forward by hand."""
    found = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: found[0])
    return found


def test_an_inner_phase_is_not_counted_in_the_outer(now):
    with PhaseClock(("generate", "reward", "forward"), CPU) as clock:
        with phase("generate"):
            now[0] += 3.0
            with phase("reward"):
                now[0] += 2.0
            now[0] += 1.0
        now[0] += 0.5
        with phase("nothing that is timed"):
            now[0] += 0.25
        found = clock.take(now[0])
    assert found == {"time/generate": 4.0, "time/reward": 2.0, "time/forward": 0.0, "time/other": 0.75}
    assert sum(clock.take(1.0).values()) == clock.take(1.0)["time/other"] == 1.0  # it has started anew


def test_a_phase_that_fails_is_left(now):
    with PhaseClock(("a", "b"), CPU) as clock:
        with pytest.raises(ValueError), phase("a"), phase("b"):
            now[0] += 1.0
            raise ValueError
        now[0] += 5.0
        assert clock.take(6.0) == {"time/a": 0.0, "time/b": 1.0, "time/other": 5.0}


def test_only_the_threads_own_clock_runs(now):
    with PhaseClock(("a",), CPU) as clock:

        def elsewhere() -> None:
            with phase("a"):
                now[0] += 1.0

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    with phase("a"):
        now[0] += 1.0
    assert clock.seconds == {"a": 0.0} and PhaseClock((), CPU).take(3.0) == {}


def test_a_run_in_shares():
    lines = [{"time/a": 1.0, "time/b": 3.0, "loss": 2.0}, {"time/a": 0.5, "time/b": 3.5}, {"loss": 1.0}]
    totals = phase_totals(lines)
    assert list(totals.items()) == [("b", 6.5), ("a", 1.5)]
    assert phase_shares(totals) == "b 81 %, a 19 %" and phase_totals([{"loss": 1.0}]) == {}
