"""Replay and RAM are chosen while a run goes on: little where nothing is forgotten, more where something is."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from moesaic.data.preparation.prepare import prepare
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from moesaic.train.validate import check_whole
from tests.train import killable
from tests.train.test_rehearsal import RECIPE, assert_same, run

CHOSEN = (
    "train.memory={ram: 20, disk: 64, swap: 3, replay: 0.125, "
    "choose: {every: 10, steps: 4, replay: [0, 0.25, 1], tolerance: 0.2}}"
)
LETTERS = "abcdefghijkl"


def domains(folder: Path, second: int) -> Path:
    """A recipe of text that goes through the letters by one, and then of text that goes by so many."""
    folder.mkdir()
    for name, stride in {"first": 1, "second": second}.items():
        texts = ["".join(LETTERS[(start + stride * n) % 12] for n in range(60 + start)) for start in range(12)]
        (folder / f"{name}.txt").write_text("|".join(texts * 20))
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    prepare(load_recipe(folder / "recipe.yaml"), folder / "data")
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return domains(tmp_path_factory.mktemp("domains") / "other", second=5)


def choices(out: Path) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, (out / "events.jsonl").open()) if event["kind"] == "replay"]


def replayed(out: Path) -> float:
    return sum(json.loads(line)["replayed"] for line in (out / "metrics.jsonl").open())


def test_replay_is_chosen_where_something_is_forgotten_and_not_where_nothing_is(other: Path, tmp_path: Path) -> None:
    run(other, tmp_path / "other", CHOSEN)
    run(domains(tmp_path / "domains", second=1), tmp_path / "alike", CHOSEN)
    found, none = choices(tmp_path / "other"), choices(tmp_path / "alike")
    assert len(found) == len(none) == 3  # before the second domain there is nothing to forget
    assert [one["replay"] for one in none] == [0, 0, 0] and replayed(tmp_path / "alike") == 0
    assert max(one["replay"] for one in found) > 0 and replayed(tmp_path / "other") > 500
    for one in found:
        best = min(tried["loss"] for tried in one["tried"])
        assert one["replay"] == min(tried["replay"] for tried in one["tried"] if tried["loss"] <= best + 0.2)


def test_trials_leave_no_trace(other: Path, tmp_path: Path) -> None:
    """Where they end in what the recipe says anyway, the run is that without them."""
    one = CHOSEN.replace("[0, 0.25, 1]", "[0.125, 1], ram: [20, 40]").replace("0.2}", "1000}")
    run(other, tmp_path / "tried", one, "train.steps=38")
    run(other, tmp_path / "never", one.replace("every: 10", "every: 1000"), "train.steps=38")
    assert [len(one["tried"]) for one in choices(tmp_path / "tried")] == [4, 4] and not choices(tmp_path / "never")
    assert_same(tmp_path / "tried", tmp_path / "never")


def test_kill_9_at_random_moments_changes_no_choice(other: Path, tmp_path: Path) -> None:
    """Also in the midst of a trial; and what was chosen before is as it was."""
    often = (
        CHOSEN.replace("every: 10", "every: 6, ram: [4, 12]")
        .replace("[0, 0.25, 1]", "[0, 0.5]")
        .replace("0.2}", "0.05}")
    )
    short = [often, "train.steps=32", "train.save_every=6"]  # a trial begins as a checkpoint is written
    run(other, tmp_path / "whole", *short)
    assert {one["replay"] for one in choices(tmp_path / "whole")} == {0, 0.5}
    chance = random.Random(3)
    for _ in range(3):
        calls = chance.randrange(5_000, 25_000)
        process = killable.start(other, tmp_path / "run", *short, inside=False, calls=calls)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    run(other, tmp_path / "run", *short)
    assert_same(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(InterruptedError):  # past the checkpoint of step 20, between two choices
        run(other, tmp_path / "stopped", *short, "train.save_every=4", stop=22)
    run(other, tmp_path / "stopped", *short)
    assert_same(tmp_path / "stopped", tmp_path / "whole")


def test_offloaded_state_is_not_tried_on(other: Path) -> None:
    with pytest.raises(UserError, match="train.memory.choose: tries settings on a copy"):
        check_whole(load_recipe(other, [CHOSEN, "train.offload={}"]), ranks=1)
