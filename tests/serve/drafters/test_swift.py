"""A draft model in a process of its own: the same tokens and bits with it, without it, and while it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import _draft_process
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.swift import Swift
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Completion
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.model.oracle import save
from tests.serve.made import talking_model
from tests.serve.tiny import page_bytes
from tests.waiting import until

PROMPTS = ["The number 7 is", "as you like it", "The number 8 is a number; The number 9", "yes or no", "x"]
WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.1, "seed": 4},
    {"temperature": 0.8, "top_p": 0.9, "seed": 5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "min_tokens": 9},
)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: Any) -> tuple[Model, Path]:
    path = talking_model(tmp_path_factory.mktemp("talking"))
    return moesaic.load(path, threads=1), path


@pytest.fixture
def made() -> Iterator[list[Swift]]:
    """Whatever a test starts is ended, and gone."""
    drafters: list[Swift] = []
    yield drafters
    pids = [drafter.process.pid for drafter in drafters]
    for drafter in drafters:
        drafter.close()
    assert not any(pid is not None and running(pid) for pid in pids)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def engine_with(model: Model, drafter: Swift, made: list[Swift], lines: bool = True, **options: Any) -> Engine:
    """One that drafts whether it pays or not; lines, where bits are compared (drafters/router.py says why)."""
    engine = Engine(model, drafter=DraftRouter.over(drafter, always=True), **options)
    made.append(drafter)
    assert isinstance(engine.drafter, DraftRouter)
    engine.drafter.only_lines = lines
    return engine


def bits(answers: list[Completion]) -> list[tuple[list[int], list[float], str]]:
    return [(one.tokens, [entry.logprob for entry in one.logprobs], one.finish_reason) for one in answers]


def test_same_bits(talking, made):
    """Five requests at once, from a cache so small that some lose their places."""
    model, path = talking
    engine = engine_with(
        model, Swift(str(path), nodes=12, wait=60.0), made, page_size=4, cache_bytes=26 * page_bytes(model, 4),
        policy=Chunked(tokens=16),
    )  # fmt: skip
    for wishes in WISHES:
        expected = Engine(model).generate(PROMPTS, max_tokens=24, **wishes)
        assert bits(engine.generate(PROMPTS, max_tokens=24, **wishes)) == bits(expected)
    assert engine.counts.accepted_tokens > 40
    assert engine.scheduler.preemptions > 0
    assert engine.page_pool.in_use == 0


def test_same_tokens_with_trees(talking, made):
    model, path = talking
    engine = engine_with(model, Swift(str(path), nodes=12, wait=60.0), made, lines=False)
    for wishes in WISHES:
        expected = Engine(model).generate(PROMPTS, max_tokens=24, **wishes)
        found = engine.generate(PROMPTS, max_tokens=24, **wishes)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert engine.counts.accepted_tokens > 40


def test_a_model_foresees_itself(talking, made):
    """Every draft token of a line that is the model's own is accepted, drawn or not."""
    model, path = talking
    for wishes in ({"temperature": 0.0}, {"temperature": 1.2, "seed": 4, "top_p": 0.95}):
        engine = engine_with(model, Swift(str(path), wait=60.0), made)
        engine.generate(["The number 7", "as you like"], max_tokens=31, ignore_eos=True, **wishes)
        assert engine.counts.accepted_tokens > 0.9 * engine.counts.drafted_tokens > 20


def test_without_waiting(talking, made):
    """As it is used: a step takes what is there."""
    model, path = talking
    drafter = Swift(str(path))
    engine = Engine(model, drafter=drafter)
    made.append(drafter)
    wishes = {"temperature": 0.7, "seed": 3, "max_tokens": 40}
    expected = bits(Engine(model).generate(PROMPTS, **wishes))
    for _ in range(3):
        assert bits(engine.generate(PROMPTS, **wishes)) == expected


def test_aborted_requests_are_forgotten(talking, made):
    model, path = talking
    drafter = Swift(str(path), wait=60.0)
    engine = engine_with(model, drafter, made)
    requests = [engine.request(prompt) for prompt in PROMPTS]
    for request in requests:
        engine.add(request)
    for request in requests:
        engine.step()
        engine.abort(request)
    assert not drafter.trees and not drafter.told
    assert engine.page_pool.in_use == 0

    def all_told() -> bool:
        drafter.process.receive(0.1)
        return drafter.process.answered

    until(all_told, "the draft process to hear of it")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_lost_in_the_middle(number, talking, made, monkeypatch):
    """The engine serves on, with the same bits; the process comes back, and drafts again."""
    monkeypatch.setattr(_draft_process, "RESTART_SECONDS", 0.01)
    model, path = talking
    drafter = Swift(str(path), wait=0.5, stall_seconds=0.4)
    engine = engine_with(model, drafter, made)
    drafter.process._backoff = 0.01
    wishes = {"temperature": 0.9, "seed": 8, "max_tokens": 30, "ignore_eos": True}
    expected = bits(Engine(model).generate(PROMPTS, **wishes))
    requests = [engine.request(prompt) for prompt in PROMPTS]
    assert bits(engine.generate(PROMPTS, **wishes)) == expected
    first, accepted = drafter.process.pid, engine.counts.accepted_tokens
    assert accepted > 0 and first is not None
    for request in requests:  # so that it is lost while it drafts
        engine.add(request)
    for _ in range(3):
        engine.step()
    os.kill(first, number)
    for _ in range(3):
        engine.step()
    for request in requests:
        engine.abort(request)
    assert bits(engine.generate(PROMPTS, **wishes)) == expected

    def drafts_again() -> bool:
        assert bits(engine.generate(PROMPTS, **wishes)) == expected
        return drafter.process.starts > 1 and engine.counts.accepted_tokens > accepted

    accepted = engine.counts.accepted_tokens
    until(drafts_again, "a new draft process")
    assert drafter.process.pid != first and not running(first)
    assert engine.page_pool.in_use == 0


PROGRAM = """
import sys, time, moesaic
from moesaic.serve.core.drafters.swift import Swift
from moesaic.serve.core.engine import Engine
drafter = Swift(sys.argv[1])
engine = Engine(moesaic.load(sys.argv[1], threads=1), drafter=drafter)
print(drafter.process.pid, flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_an_engine_that_is_killed_leaves_none(stopped, talking):
    """Also not one that was stopped, which sees no socket close."""
    command = [sys.executable, "-c", PROGRAM, str(talking[1]), "stay"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        assert running(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        engine.kill()
    until(lambda: not running(pid), "the end of the draft process")


def test_an_engine_that_ends_leaves_none(talking):
    command = [sys.executable, "-c", PROGRAM, str(talking[1]), "end"]
    pid = int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    until(lambda: not running(pid), "the end of the draft process")


def test_what_cannot_start_is_said(talking, tmp_path):
    model, path = talking
    with pytest.raises(UserError, match="no-such-model"):
        Engine(model, drafter=Swift(str(tmp_path / "no-such-model")))
    save("llama-tied", tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="another tokenizer"):
        Engine(model, drafter=Swift(str(tmp_path / "other")))
    with pytest.raises(ValueError, match="width"):
        Swift(str(path), width=0)
