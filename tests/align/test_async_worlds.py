"""Asynchronous rollouts in worlds with tasks of their own: a worker plays them, a trainer learns from its turns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moesaic.align.align import align
from tests.align.made import recipe_of
from tests.serve.made import talking_model

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
