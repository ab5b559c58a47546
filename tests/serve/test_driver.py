"""One driver steps the engine for all: outputs reach whoever submitted the request, and a failed step costs no page."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.engine import Engine
from tests.serve.tiny import tiny_model

GREEDY = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def engine() -> Engine:
    return Engine(tiny_model(), page_size=4)


def failing(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """The next forward stops in its middle, once."""
    run, broken = engine.runner.run, [True]

    def fail(work: Any) -> Any:
        if broken:
            broken.clear()
            for chunk in work:
                chunk.request.begin_forward()
            raise error
        return run(work)

    monkeypatch.setattr(engine.runner, "run", fail)


@pytest.mark.parametrize("error", [RuntimeError("ours"), KeyboardInterrupt()], ids=repr)
def test_generate_raises_the_error_itself_and_leaves_nothing_behind(engine, monkeypatch, error):
    wanted = Engine(tiny_model(), page_size=4).generate([[5, 6, 7, 8, 9]], **GREEDY)[0].tokens
    failing(engine, monkeypatch, error)
    with pytest.raises(type(error)):
        engine.generate([[5, 6, 7, 8, 9], [3, 4]], **GREEDY)
    assert not engine.scheduler.requests and not engine.page_pool.in_use
    assert engine.page_pool.available == engine.cache.pages
    assert engine.generate([[5, 6, 7, 8, 9]], **GREEDY)[0].tokens == wanted


def test_outputs_go_to_whoever_submitted_the_request(engine):
    mine, theirs = EngineDriver[str](engine), EngineDriver[str](engine)
    requests = [engine.request([5, 6, 7]), engine.request([8, 9])]
    mine.add(requests[0], "mine")
    theirs.add(requests[1], "theirs")
    step = mine.step()
    assert [receiver for receiver, _ in step.outputs] == ["mine"] and step.outputs[0][1].request is requests[0]
    mine.abort_all()
    theirs.abort_all()
    assert not mine.open and not theirs.open and not engine.page_pool.in_use
    assert mine.step().idle


def test_a_failed_step_names_all_who_lost_their_requests(engine, monkeypatch):
    driver = EngineDriver[int](engine)
    for number in range(3):
        driver.add(engine.request([5, 6, 7 + number]), number)
    error = RuntimeError("ours")
    failing(engine, monkeypatch, error)
    step = driver.step()
    assert step.error is error and sorted(step.lost) == [0, 1, 2] and not step.outputs and not driver.open
    assert not engine.scheduler.requests and not engine.page_pool.in_use
