"""Scores along a run's life: each kept checkpoint once, with its own weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.train.checkpoints import Checkpoints

RECIPE = """
model: {vocab: 300, hidden: 16, layers: 2, heads: 2, kv_heads: 1, head_size: 8, dense_hidden: 16, experts: 2,
        experts_per_token: 1, expert_hidden: 8, context: 64}
data:
  sources: [{name: sums, path: "builtin:sums", documents: 300}]
  sequence_length: 32
  tokenizer_sample: 50000
train: {steps: 12, batch_tokens: 128, save_every: 4, keep_every: 4, keep_last: 1}
optimizer: {name: adamw, lr: 0.01}
"""
ASK = ["--checkpoints", "--suite", "tasks", "examples=3", "max_tokens=4", "plain=true", "--json"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "recipe.yaml").write_text(RECIPE)
    assert main(["train", str(folder / "recipe.yaml"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_every_checkpoint_is_measured_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(run), *ASK]) == 0
    (lines,) = json.loads(capsys.readouterr().out)["runs"].values()
    assert [line["step"] for line in lines] == Checkpoints(run, 1, 0).steps() == [4, 8, 12]
    assert len({line["weights"] for line in lines}) == 3
    assert all(line["numbers"]["examples"] == 3 and line["options"]["plain"] for line in lines)
    kept = (run / "scores.jsonl").read_text()
    assert main(["evaluate", str(run), *ASK]) == 0
    assert (run / "scores.jsonl").read_text() == kept  # nothing was measured again
    assert main(["evaluate", str(run), *ASK, "examples=2"]) == 0  # other questions are
    assert len((run / "scores.jsonl").read_text().splitlines()) == 6


def test_what_is_no_run_is_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tmp_path), *ASK]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert main(["evaluate", str(run), *ASK, "--out", str(tmp_path / "out")]) == 2
    assert "--out" in capsys.readouterr().err
