"""A run on one domain after another, with a memory: it forgets less, and a killed one goes on to the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import moesaic
from moesaic.data.memory import FILE
from moesaic.data.preparation.prepare import prepare
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from moesaic.train.loop import train
from moesaic.train.run import Run
from moesaic.train.validate import check_whole

RECIPE = """
model: {vocab: 300, hidden: 32, layers: 2, heads: 2, kv_heads: 1, head_size: 16, dense_hidden: 48, experts: 4,
        expert_hidden: 16, context: 32, tied: true}
data:
  sources:
    - {name: first, path: FOLDER/first.txt, separator: "|"}
    - {name: second, path: FOLDER/second.txt, separator: "|"}
  dedupe: {exact: false}
  quality: null
  sequence_length: 32
  phases: [{share: 0.5, weights: {first: 1.0}}, {share: 0.5, weights: {second: 1.0}}]
train: {steps: 60, batch_tokens: 256, warmup_steps: 3, save_every: 100, dtype: float32, data: FOLDER/data}
optimizer: {name: adamw, lr: 0.01}
"""
MEMORY = "train.memory={ram: 8, disk: 64, swap: 3, replay: 0.5}"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("domains")
    (folder / "first.txt").write_text("|".join(f"abcdefgh{'ijkl'[n % 4]}mnop" for n in range(200)))
    (folder / "second.txt").write_text("|".join(f"ponmlkji{'hgfe'[n % 4]}dcba" for n in range(200)))
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    prepare(load_recipe(folder / "recipe.yaml"), folder / "data")
    return folder / "recipe.yaml"


def run(file: Path, out: Path, *overrides: str, stop: int = 0) -> Run:
    class Stops(Run):
        def log_step(self, *given: Any) -> None:
            super().log_step(*given)
            if self.step == stop:
                raise InterruptedError

    recipe = load_recipe(file, overrides)
    made = Stops(recipe, out, Path(str(recipe.train.data)), quiet=True)
    made.plots = False
    train(made)
    return made


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_what_was_learned_first_is_kept_and_what_is_new_is_learned(file: Path, tmp_path: Path) -> None:
    found = {}
    for name, given in {"without": [], "with": [MEMORY]}.items():
        run(file, tmp_path / name, *given)
        model = moesaic.load(tmp_path / name)
        assert model.tokenizer is not None
        said = [model.logprobs([model.tokenizer.encode(text)])[0].mean() for text in ("abcdefghimnop", "ponmlkjihdcba")]
        found[name] = [-float(one) for one in said]
    assert found["without"][0] > found["with"][0] + 1.0  # nats per token, of the first domain
    assert found["with"][1] < found["without"][1] + 0.2


def test_killed_it_goes_on_to_the_same_bits(file: Path, tmp_path: Path) -> None:
    short = [MEMORY, "train.steps=24", "train.save_every=5"]
    run(file, tmp_path / "whole", *short)
    with pytest.raises(InterruptedError):
        run(file, tmp_path / "parts", *short, stop=18)  # past the checkpoint of step 15
    run(file, tmp_path / "parts", *short)
    assert_same(tmp_path / "parts", tmp_path / "whole")


def assert_same(one: Path, other: Path) -> None:
    assert losses(one) == losses(other)
    a, b = (load_file(path / "model.safetensors") for path in (one, other))
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert (one / "memory" / FILE).read_bytes() == (other / "memory" / FILE).read_bytes()


def test_it_is_for_one_process_yet(file: Path) -> None:
    with pytest.raises(UserError, match="train.memory: is for one process yet"):
        check_whole(load_recipe(file, [MEMORY]), ranks=2)
