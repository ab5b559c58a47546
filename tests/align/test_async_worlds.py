"""Asynchronous rollouts in worlds with tasks of their own: a worker plays them, a trainer learns from its turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.align.align import align
from moesaic.align.rollouts.async_stream import AsyncRolloutStream
from moesaic.align.rollouts.worker_pool import WorkerPool
from tests.align.made import recipe_of, without_times
from tests.serve.made import talking_model
from tests.waiting import until

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    "name", ["{name: shop, browser: text, turns: 2}", "{name: repair, turns: 2}", "{name: lateral, turns: 2}"]
)
def test_workers_play_in_a_world(tmp_path: Path, name: str) -> None:
    base = talking_model(tmp_path / "base", context=4096)
    stage = (
        "{name: policy, steps: 2, lr: 0.001, prompts: 2, group: 2, max_tokens: 6, "
        f"environment: {name}, asynchronous: {{workers: 1, staleness: 1}}, "
        "rewards: [{name: environment}, {name: repetition, n: 1, unit: characters}]}"
    )
    align(recipe_of(tmp_path, stage), base, tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["reward_problems"] == 0 for line in lines)
    assert all(line["tokens"] > 0 and "reward" in line for line in lines)


def test_episodes_that_were_played_ahead_change_nothing_that_is_learned(tmp_path: Path, monkeypatch) -> None:
    """A worker with nothing to do plays the episodes that come next; the run is the one without workers, to the bit."""
    base = talking_model(tmp_path / "base", context=4096)
    stage = (
        "{name: policy, steps: 3, lr: 0.003, prompts: 2, group: 2, max_tokens: 12, advantage: group_centred, "
        "environment: {name: sql, turns: 2}, drafter: suffix, "
        "rewards: [{name: environment}, {name: repetition, n: 1, unit: characters}]"
    )
    align(recipe_of(tmp_path, f"{stage}}}"), base, tmp_path / "plain", quiet=True)
    collect_rollouts, taken = AsyncRolloutStream.collect_rollouts, []

    def slowly(stream: AsyncRolloutStream):
        """A trainer that takes its time once, until the worker has played some of what comes."""
        found = collect_rollouts(stream)
        taken.append(found)
        if len(taken) == 1:
            until(lambda: stream.workers.poll(0.1) == [] and stream.workers.counts.ahead > 0, "running ahead")
        return found

    monkeypatch.setattr(AsyncRolloutStream, "collect_rollouts", slowly)
    ahead = f"{stage}, asynchronous: {{staleness: 0, run_ahead: true}}}}"
    align(recipe_of(tmp_path, ahead), base, tmp_path / "ahead", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "ahead" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["ran_ahead"] > 0 and all(line["staleness_max"] == 0 for line in lines)
    one, other = (moesaic.load(tmp_path / name).state_dict() for name in ("plain", "ahead"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(not torch.equal(one[name], moesaic.load(base).state_dict()[name]) for name in one)


PLAYED = (
    "{name: policy, steps: 4, lr: 0.003, prompts: 2, group: 2, max_tokens: 12, save_every: 1, evaluate_every: 0, "
    "advantage: group_centred, environment: {name: several, worlds: [sql, cards], turns: 2}, drafter: suffix, "
    "rewards: [{name: environment}, {name: repetition, n: 1, unit: characters}]"
)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return moesaic.load(out).state_dict()


def test_a_trainer_that_is_killed_in_worlds_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    base = talking_model(tmp_path / "base", context=4096)
    recipe, out = recipe_of(tmp_path, f"{PLAYED}}}"), tmp_path / "killed"
    align(recipe, base, tmp_path / "plain", quiet=True)
    command = [sys.executable, "-m", "moesaic", "align", str(tmp_path / "align.yaml"), "--model", str(base)]
    first = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: first.poll() is not None or any((out / "checkpoints").glob("step-*")), "a checkpoint")
    finally:
        first.kill()
        first.wait()
    align(recipe, base, out, quiet=True)
    one, other = weights(tmp_path / "plain"), weights(out)
    assert all(torch.equal(one[name], other[name]) for name in one)
    rewards = [
        [json.loads(line)["reward"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("plain", "killed")
    ]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 4


def test_a_worker_that_is_killed_while_it_plays_costs_nothing_but_time(tmp_path: Path, monkeypatch) -> None:
    """Its death is seen while a checkpoint waits for what is in flight, and told with the next rollouts."""
    base = talking_model(tmp_path / "base", context=4096)
    recipe = recipe_of(tmp_path, f"{PLAYED}, asynchronous: {{staleness: 1, on_update: finish}}}}")
    align(recipe, base, tmp_path / "undisturbed", quiet=True)
    submit, submitted = WorkerPool.submit, []

    def submit_and_kill(workers: WorkerPool, tasks) -> None:
        submit(workers, tasks)
        submitted.extend([len(tasks)] * bool(tasks))
        if len(submitted) == 3 and tasks:  # those before are done; the episodes of these have begun, or are about to
            (worker,) = workers.handles
            ray.get(worker.actor.abort.remote(-1))  # heard after them
            assert worker.process
            os.kill(worker.process, signal.SIGKILL)

    monkeypatch.setattr(WorkerPool, "submit", submit_and_kill)
    align(recipe, base, tmp_path / "killed", quiet=True)
    found, expected = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("killed", "undisturbed")
    )
    assert [line["worker_deaths"] for line in found] == [0, 0, 1, 0]
    assert sum(line["requeued"] for line in found) == submitted[2]
    timed = {"trainer_waited", "workers_waited", "worker_deaths", "requeued", "accepted_per_step", "tokens_per_pass"}
    assert without_times(found, timed) == without_times(expected, timed)
    one, other = weights(tmp_path / "killed"), weights(tmp_path / "undisturbed")
    assert all(torch.equal(one[name], other[name]) for name in one)
