"""`moesaic consistency`: documents scored by models that have not seen them, and by the proxy."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from moesaic.cli import main
from moesaic.data.shards import Shards
from moesaic.train import consistency
from moesaic.train.consistency import agreement

RECIPE = """
model: {vocab: 300, hidden: 16, layers: 2, heads: 2, kv_heads: 1, head_size: 8, dense_hidden: 32, experts: 2,
        experts_per_token: 1, expert_hidden: 16, context: 32, tied: true}
data:
  sources:
    - {name: rules, path: rules.jsonl}
    - {name: noise, path: noise.jsonl}
  sequence_length: 32
  quality: null
train: {steps: 60, batch_tokens: 256}
optimizer: {name: adamw, lr: 0.02}
"""


def test_regular_documents_score_higher_when_held_out_and_both_become_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = random.Random(0)
    rules = [f"{n} is a number and {n} is not a word" for n in range(60)]
    noise = ["".join(chance.choices("abcdefghijklmnop", k=30)) for _ in range(60)]
    for name, texts in (("rules", rules), ("noise", noise)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("recipe.yaml").write_text(RECIPE)
    seen, scored, stream, predicted = [], [], consistency._stream, consistency.predicted
    monkeypatch.setattr(consistency, "_stream", lambda small, some: seen.append(set(some)) or stream(small, some))
    monkeypatch.setattr(
        consistency,
        "predicted",
        lambda data, run, some, **how: scored.append(set(some)) or predicted(data, run, some, **how),
    )
    options = ["--models", "4", "--steps", "16", "--length", "32", "--json"]
    assert main(["consistency", "recipe.yaml", "--out", "out", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == 120 and report["proxy"]["low"] <= report["proxy"]["rank"] <= report["proxy"]["high"]
    data = Shards("out/data")
    for trained_on, asked in zip(seen[:4], scored[:4], strict=True):  # the fifth is for the proxy
        assert not trained_on & asked and trained_on | asked == set(range(data.documents))
    for column in ("consistency", "consistency_proxy"):
        values = data.column(column)
        assert values[data.domain == 0].mean() > 1.5 * values[data.domain == 1].mean()
    assert report["proxy"]["rank"] > 0.4
    by_it = ["train.data=out/data", "train.steps=1", "data.curriculum=consistency"]
    assert main(["train", "recipe.yaml", "--out", "run", *by_it]) == 0


def test_agreement_has_an_interval_around_it() -> None:
    chance = np.random.default_rng(0)
    one = chance.normal(size=300)
    other = np.append(one[:-1] + 0.5 * chance.normal(size=299), np.nan)
    found = agreement(one, other)
    assert 0.8 < found.low < found.rank < found.high < 0.95
    assert agreement(one, chance.normal(size=300)).low < 0.1
