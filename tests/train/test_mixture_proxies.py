"""`moesaic mix`: proxies with random weights, their losses, and the mixture that is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from moesaic.cli import main
from moesaic.recipe import load_recipe
from moesaic.train import proxies

RECIPE = """
model: {vocab: 300, hidden: 16, layers: 2, heads: 2, kv_heads: 1, head_size: 8, dense_hidden: 32,
        experts: 2, experts_per_token: 1, expert_hidden: 16, context: 32, tied: true}
data:
  sources:
    - {name: code, path: code.txt, separator: "---"}
    - {name: sums, path: "builtin:sums", documents: 200}
  sequence_length: 32
  tokenizer_sample: 20000
  topics: {topics: 3, iterations: 4, common: 1.0}
train: {steps: 40, batch_tokens: 128}
optimizer: {name: adamw, lr: 0.003}
"""
OPTIONS = ["--proxies", "5", "--steps", "2", "--tokens", "500"]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    code = [f"def add_{n}(a, b):\n    return a + b + {n}\n" for n in range(150)]
    (tmp_path / "code.txt").write_text("---".join(code))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def test_weights_of_topics_are_found_printed_and_can_be_trained_with(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["mix", str(recipe), "--out", "mix", *OPTIONS, "--on", "sums", "data.mix_by=topic"]) == 0
    text = capsys.readouterr().out
    snippet = yaml.safe_load(text[text.index("data:") : text.index("\n\nAll numbers")])
    weights = snippet["data"]["phases"][0]["weights"]
    assert sum(weights.values()) == pytest.approx(1, abs=0.001) and all(name.startswith("topic") for name in weights)
    losses = [proxy["loss"] for proxy in json.loads(Path("mix/mixture.json").read_text())["proxies"]]
    assert len(set(losses)) == 5  # each was trained on a mixture of its own
    mixed = recipe.parent / "mixed.yaml"
    before = yaml.safe_load(RECIPE)
    mixed.write_text(yaml.safe_dump({**before, "data": {**before["data"], **snippet["data"]}}))
    assert load_recipe(mixed).data.mix_by == "topic"
    assert main(["train", str(mixed), "--out", "run", "train.data=mix/data", "train.steps=1"]) == 0

    def refuse(*arguments: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(proxies, "train", refuse)
    capsys.readouterr()
    assert main(["mix", str(recipe), "--out", "mix", *OPTIONS, "--on", "sums", "data.mix_by=topic", "--json"]) == 0
    assert [proxy["loss"] for proxy in json.loads(capsys.readouterr().out)["proxies"]] == losses


def test_a_source_that_is_not_there_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mix", str(recipe), "--out", "mix", *OPTIONS, "--on", "sum"]) == 2
    assert 'no source is named "sum"; did you mean sums' in capsys.readouterr().err
