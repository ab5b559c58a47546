"""`moesaic quantiles` on two builtin sources: the table, the recommendation, resuming after a stop, mistakes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from moesaic.cli import main
from moesaic.recipe import load_recipe
from moesaic.train import proxies
from moesaic.train.quantile_proxies import run_proxies
from tests.forked import Forked
from tests.waiting import PATIENCE

RECIPE = """
model: {vocab: 300, hidden: 16, layers: 2, heads: 2, kv_heads: 1, head_size: 8, dense_hidden: 16, experts: 2,
        experts_per_token: 1, expert_hidden: 8, context: 32}
data:
  sources:
    - {name: code, path: "builtin:stdlib", documents: 30}
    - {name: sums, path: "builtin:arithmetic", documents: 300}
  sequence_length: 32
  tokenizer_sample: 50000
train: {batch_tokens: 128}
optimizer: {name: adamw, lr: 0.01}
"""
OPTIONS = ["--quantiles", "2", "--steps", "4", "--tokens", "1000"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("quantiles") / "recipe.yaml"
    file.write_text(RECIPE)
    return file


@pytest.fixture(scope="module")
def done(recipe: Path) -> Path:
    out = recipe.parent / "done"
    assert main(["quantiles", str(recipe), "--out", str(out), *OPTIONS]) == 0
    return out


def test_the_table_and_a_mixture_that_a_recipe_takes(
    recipe: Path, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantiles", str(recipe), "--out", str(done), *OPTIONS]) == 0
    table, _, snippet = capsys.readouterr().out.partition("\n\n")
    rows = table.splitlines()
    assert rows[0].split() == ["source", "0%-50%", "50%-100%", "of", "quality"]
    assert rows[1].startswith("code") and rows[2].startswith("sums") and "*" in rows[1] + rows[2]
    phases = yaml.safe_load(snippet.partition("\n\n")[0])["data"]["phases"]
    assert sum(phase["share"] for phase in phases) == pytest.approx(1)
    mixed = recipe.parent / "mixed.yaml"
    mixed.write_text(
        yaml.safe_dump(yaml.safe_load(RECIPE) | {"data": {**yaml.safe_load(RECIPE)["data"], "phases": phases}})
    )
    assert len(load_recipe(mixed).data.phases) == len(phases)


def test_json_and_nothing_is_trained_twice(
    recipe: Path, done: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(proxies, "train", refuse)
    assert main(["quantiles", str(recipe), "--out", str(done), *OPTIONS, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(piece["source"], piece["number"]) for piece in report["slices"]] == [
        ("code", 0),
        ("code", 1),
        ("sums", 0),
        ("sums", 1),
    ]
    assert report["phases"][0]["weights"].keys() == {"code", "sums"}
    assert report["losses"].keys() == {f"{name} {band}" for name in ("code", "sums") for band in ("0%-50%", "50%-100%")}
    # Each loss is of a model that is there, on the same text.
    losses = [piece["loss"] for piece in report["slices"]]
    assert len(set(losses)) == 4 and all(4 < loss < 7 for loss in losses)
    saved = json.loads((done / "quantiles.json").read_text())
    assert saved["slices"] == report["slices"]


def test_other_requests_are_measured_anew(recipe: Path, done: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "data").symlink_to(done / "data")
    found = run_proxies(load_recipe(recipe), tmp_path / "out", steps=4, quantiles=2, tokens=1000, on="sums", seeds=2)
    assert all(len(losses) == 2 for losses in found.losses.values()) and found.noise and found.noise > 0
    # What is learned from sums helps with sums.
    by_source = {name: min(p.loss for p in found.table.slices if p.source == name) for name in ("code", "sums")}
    assert by_source["sums"] < by_source["code"]


def test_other_steps_are_trained_anew(recipe: Path, done: Path, tmp_path: Path) -> None:
    losses = {}
    for name, several in (("fresh", [2]), ("again", [4, 2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").symlink_to(done / "data")
        for steps in several:
            losses[name] = run_proxies(
                load_recipe(recipe), tmp_path / name, steps=steps, quantiles=2, tokens=1000
            ).losses
    assert losses["again"] == losses["fresh"]


def test_stopped_and_gone_on_with_it_ends_the_same(recipe: Path, done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "data").symlink_to(done / "data")
    command = ["quantiles", str(recipe), "--out", str(out), *OPTIONS]
    process = Forked(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + PATIENCE
    while not any(file.stat().st_size for file in out.glob("proxies/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told
    assert "Run the same command to resume" in told and "Traceback" not in told
    assert not (out / "quantiles.json").exists()
    assert main(["quantiles", str(recipe), "--out", str(out), *OPTIONS]) == 0
    assert (out / "quantiles.json").read_text() == (done / "quantiles.json").read_text()


def test_mistakes_are_told(recipe: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*more: str) -> str:
        assert main(["quantiles", str(recipe), "--out", str(done), *more]) == 2
        return capsys.readouterr().err

    assert 'no source is named "cod"; did you mean code?' in told("--on", "cod")
    assert 'no column "grade"' in told("--column", "grade", "--steps", "2")
    assert "greater than or equal to 2" in told("--quantiles", "1")
    assert "less than or equal to 10000000" in told("--steps", "20000000")
    data = f"train.data={_without_held_out(recipe, tmp_path)}"
    message = told(data)
    assert "documents of code is held out from training, to evaluate on" in message
    assert "Prepare it again with a larger data.held_out, or more documents." in message
    assert "was prepared without songs" in told(data, "data.sources=[{name: songs, path: 'builtin:arithmetic'}]")


def test_a_source_too_small_for_its_share_to_be_held_out(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = "data.sources=[{name: code, path: 'builtin:stdlib', documents: 2}]"
    assert main(["quantiles", str(recipe), "--out", str(tmp_path / "out"), *OPTIONS, few, "data.held_out=0.001"]) == 2
    message = capsys.readouterr().err
    assert "none of the 2 documents of code is held out" in message and "larger data.held_out" in message
    assert not (tmp_path / "out" / "proxies").exists()


def _without_held_out(recipe: Path, folder: Path) -> Path:
    assert main(["prepare", str(recipe), "--out", str(folder / "data")]) == 0
    return folder / "data"


def test_a_column_is_missed_before_data_is_prepared(recipe: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["quantiles", str(recipe), "--out", str(out), "--column", "grade"]) == 2
    assert 'the data would have no column "grade" for code; known: quality' in capsys.readouterr().err
    assert not out.exists()
