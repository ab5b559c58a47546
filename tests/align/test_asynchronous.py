"""Rollouts beside the trainer, with real workers on Ray: the same run as without them, whoever is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.align.align import align
from moesaic.align.rewards.math import MathEqual
from moesaic.align.rollouts.async_stream import AsyncRolloutStream
from moesaic.align.rollouts.pool import Rollout, RolloutPool
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.rollouts.worker_pool import WorkerPool
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import requests_for
from moesaic.worlds.example import Example
from tests.align.made import without_times
from tests.waiting import PATIENCE, until

ray = pytest.importorskip("ray")
FAMILY = "builtin:chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=1"
STEPS = 6
TIMED = {"trainer_waited", "workers_waited", "accepted_per_step", "tokens_per_pass"}
TIMED |= {"worker_deaths", "requeued", "ran_ahead"}


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def recipe(path: Path, asynchronous: str = "", **options) -> Path:
    """A run whose answers are rewarded by their letters, so that a model that knows nothing learns something."""
    settings = {"steps": STEPS, "prompts": 3, "group": 4, "max_tokens": 12, "save_every": 2, "evaluate_every": 0}
    given = ", ".join(f"{key}: {value}" for key, value in (settings | options).items())
    file = path / f"recipe{abs(hash((asynchronous, given)))}.yaml"
    file.write_text(
        f"""
align:
  stages:
    - {{name: policy, lr: 0.003, data: [{{path: "{FAMILY}"}}], {given}, advantage: group_centred,
        rewards: [{{name: repetition, n: 1, unit: characters}}], drafter: suffix,
        {f"asynchronous: {asynchronous}" if asynchronous else ""}}}
optimizer: {{name: adamw, lr: 0.001}}
"""
    )
    return file


def run(base: Path, out: Path, asynchronous: str = "", **options) -> list[dict]:
    align(load_recipe(recipe(out.parent, asynchronous, **options), []), base, out, quiet=True)
    return lines(out)


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def untimed(found: list[dict], also: frozenset[str] = frozenset()) -> list[dict]:
    return without_times(found, TIMED | also)


def same_weights(one: Path, other: Path) -> bool:
    a, b = moesaic.load(one).state_dict(), moesaic.load(other).state_dict()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_staleness_0_is_the_synchronous_run(base, tmp_path, cluster):
    plain = run(base, tmp_path / "plain", updates=2, dynamic=2)
    beside = run(base, tmp_path / "beside", "{staleness: 0}", updates=2, dynamic=2)
    assert any(line["loss"] != 0 for line in plain)
    shared = [{key: line[key] for key in other if key in line} for line, other in zip(untimed(beside), untimed(plain))]
    assert shared == untimed(plain)
    assert same_weights(tmp_path / "plain", tmp_path / "beside")
    assert not ray.util.list_named_actors() and ray.is_initialized()  # a cluster that was there is left


def test_run_ahead_changes_nothing_that_is_learned(base, tmp_path, cluster, monkeypatch):
    plain = run(base, tmp_path / "plain")
    collect_rollouts, taken = AsyncRolloutStream.collect_rollouts, []

    def slowly(stream: AsyncRolloutStream):
        """A trainer that twice takes its time, until the worker has made some of it."""
        found = collect_rollouts(stream)
        taken.append(found)
        if len(taken) <= 2:
            until(lambda: stream.workers.poll(0.1) == [] and stream.workers.counts.ahead > 0, "running ahead")
        return found

    monkeypatch.setattr(AsyncRolloutStream, "collect_rollouts", slowly)
    ahead = run(base, tmp_path / "ahead", "{staleness: 0, run_ahead: true}")
    assert same_weights(tmp_path / "plain", tmp_path / "ahead")
    assert [line["reward"] for line in ahead] == [line["reward"] for line in plain]
    assert all(line["ran_ahead"] > 0 for line in ahead[:2]) and all(line["staleness_max"] == 0 for line in ahead)


@pytest.fixture(scope="module")
def undisturbed(base, tmp_path_factory, cluster):
    out = tmp_path_factory.mktemp("finish") / "undisturbed"
    found = run(base, out, "{staleness: 1, on_update: finish}")
    assert [line["staleness_max"] for line in found] == [0, 1, 1, 1, 1, 1]
    return out


def test_killed_and_hung_workers_cost_nothing_but_time(base, tmp_path, undisturbed, monkeypatch):
    plain, plain_poll, done = WorkerPool.publish, WorkerPool.poll, []

    def publish(workers: WorkerPool, version, weights):
        """The questions of the version before are being answered, or about to be."""
        if workers.handles[0].process and len(done) < 2 and version in (3, 5):
            os.kill(workers.handles[0].process, signal.SIGKILL if version == 3 else signal.SIGSTOP)
            done.append(workers.handles[0].process)
        plain(workers, version, weights)

    def poll(workers: WorkerPool, seconds: float):
        """The time of a worker that is stopped is over at once, and of no other."""
        (worker,) = workers.handles
        hung = len(done) == 2 and worker.started and worker.process == done[1]
        with monkeypatch.context() as now:
            now.setattr(workers, "patience", 0.0 if hung else workers.patience)
            return plain_poll(workers, seconds)

    monkeypatch.setattr(WorkerPool, "publish", publish)
    monkeypatch.setattr(WorkerPool, "poll", poll)
    found = run(base, tmp_path / "killed", "{staleness: 1, on_update: finish}")
    assert len(done) == 2 and sum(line["worker_deaths"] for line in found) == 2
    assert untimed(found) == untimed(lines(undisturbed)) and same_weights(tmp_path / "killed", undisturbed)
    assert sum(line["failed"] + line["dropped"] for line in found) == 0


def saved(out: Path) -> list[Path]:
    """Written in the background, so later than the lines of their steps."""
    return list((out / "checkpoints").glob("step-*"))


@pytest.fixture(scope="module")
def orphans():
    """Marks of processes that must end by themselves; what is left after a kill is looked for when all else is done."""
    marks: list[str] = []
    yield marks
    # Ray's own agents look for the raylet once in a while: a minute was seen.
    until(lambda: not any(map(processes_of, marks)), "the end of all that was started", every=0.2)


def test_a_killed_trainer_goes_on_to_the_same_bits(base, tmp_path, undisturbed, orphans):
    out = tmp_path / "killed"
    file = recipe(tmp_path, "{staleness: 1, on_update: finish}")
    command = [sys.executable, "-m", "moesaic", "align", str(file), "--model", str(base), "--out", str(out)]
    ours = os.environ | {"MOESAIC_TEST": str(out)}
    ours.pop("RAY_ADDRESS", None)
    orphans.append(f"{out}-first")
    first = subprocess.Popen(
        command, env=ours | {"MOESAIC_TEST": orphans[0]}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until(lambda: first.poll() is not None or (len(lines_so_far(out)) >= 3 and saved(out)))
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    again = subprocess.run(command, env=ours, capture_output=True, text=True, timeout=PATIENCE)
    assert again.returncode == 0, again.stderr
    assert processes_of(str(out)) == []
    assert untimed(lines(out)) == untimed(lines(undisturbed)) and same_weights(out, undisturbed)
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "resume" for event in events)


def lines_so_far(out: Path) -> list[str]:
    file = out / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


def processes_of(mark: str) -> list[int]:
    """Processes that inherited a mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"MOESAIC_TEST={mark}\0".encode() in (entry / "environ").read_bytes():
                if (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
def test_answers_go_on_under_new_weights(base, tmp_path, cluster, on_update, monkeypatch):
    """Groups of very different length, so that some are under way when weights come."""
    taken: list[Sample] = []
    plain = AsyncRolloutStream.collect_rollouts

    def collect_rollouts(stream: AsyncRolloutStream):
        groups, every = plain(stream)
        taken.extend(sample for group in groups for sample in group)
        return groups, every

    monkeypatch.setattr(AsyncRolloutStream, "collect_rollouts", collect_rollouts)
    options = f"{{staleness: 2, on_update: {on_update}}}"
    for attempt in range(20):  # a worker may happen to be done with everything whenever weights come
        found = run(base, tmp_path / f"out{attempt}", options, max_tokens=120, prompts=2, group=2, steps=8)
        assert len(found) == 8 and all(line["staleness_max"] <= 2 for line in found)
        assert max(line["staleness_max"] for line in found) > 0
        assert all(sample.versions == sorted(sample.versions) for sample in taken)
        if on_update == "recompute":  # what was sampled from the trainer's weights is the trainer's to the bit
            assert all(line["mismatch_max"] == 0 for line in found)
        if mixed := [sample for sample in taken if len(set(sample.versions)) > 1]:
            break
    assert mixed


def test_a_reward_whose_process_is_killed_judges_again(base):
    """Also a question that cannot be asked, and one that is given up, cost nobody else anything."""
    engine = Engine(moesaic.load(base, threads=1), cache_bytes=4 << 20)
    reward = MathEqual()
    pool = RolloutPool(engine, [("math", 1.0, reward)], judged_again=True)
    examples = [Example(({"role": "user", "content": f"{n} + {n}"},), f"{2 * n}") for n in range(4)]
    for number, example in enumerate(examples):
        requests = requests_for(engine, example, 2, {"max_tokens": 6 if number else 400}, number)
        pool.add(number, [Rollout(example, request) for request in requests])
    killed = threading.Event()

    def kill() -> None:
        while not killed.is_set():
            if (process := reward.worker._process) is not None:
                process.kill()
                killed.set()
            time.sleep(0.001)

    thread = threading.Thread(target=kill)
    thread.start()
    pool.step()
    pool.give_up(0)
    ended = []
    while pool.groups:
        ended += pool.step()
        if not engine.working:
            pool.changed.wait(1)
    killed.set()
    thread.join()
    pool.close()
    assert sorted(number for number, _ in ended) == [1, 2, 3] and not engine.scheduler.requests
    for _, samples in ended:
        assert isinstance(samples, list) and all(not sample.judged.problems for sample in samples)


def test_an_engine_that_fails_gives_up_what_it_holds_and_goes_on(base, monkeypatch):
    engine = Engine(moesaic.load(base, threads=1), cache_bytes=4 << 20)
    pool = RolloutPool(engine, [])
    example = Example(({"role": "user", "content": "1 + 1"},), "2")

    def add(number: int) -> None:
        requests = requests_for(engine, example, 2, {"max_tokens": 4}, number)
        pool.add(number, [Rollout(example, request) for request in requests])

    add(0)
    pool.step()
    with monkeypatch.context() as broken:
        broken.setattr(engine.model, "forward", None)
        broken.setattr("moesaic.serve.core.forward_pass.ForwardPass", None)
        ((number, problem),) = pool.step()
    assert number == 0 and isinstance(problem, TypeError)
    assert not engine.scheduler.requests and not engine.page_pool.in_use
    add(1)
    ended = []
    while pool.groups:
        ended += pool.step()
    assert [number for number, _ in ended] == [1] and len(ended[0][1]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{worker: 1}", "workers"),
        ("{staleness: -1}", "at least 0"),
        ("{on_update: never}", "recompute"),
        ("{workers: 0}", "at least 1"),
    ],
)
def test_bad_options_are_refused(base, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        run(base, tmp_path / "out", options)
