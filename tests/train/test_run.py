"""Training end to end on tiny data: it learns, it resumes to the same bits, and what goes wrong is said."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import moesaic
from moesaic.atomic import exclusive
from moesaic.cli import main
from moesaic.data.preparation.prepare import prepare
from moesaic.data.shards import Shards
from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.recipe import Recipe, load_recipe
from moesaic.train import spike_detection
from moesaic.train.checkpoints import Checkpoints
from moesaic.train.law.runs import HELD_OUT, read_run
from moesaic.train.loop import train
from moesaic.train.pretrain import pretrain
from moesaic.train.report.metrics import read_events
from moesaic.train.run import Run
from moesaic.train.spike_detection import MAX_NONFINITE
from tests.train import killable

RECIPE = """
model:
  vocab: 512
  hidden: 32
  layers: 3
  heads: 2
  kv_heads: 1
  head_size: 16
  dense_hidden: 48
  experts: 4
  expert_hidden: 16
  context: 64
  mtp_layers: 1
data:
  sources: [{name: sums, path: "builtin:arithmetic", documents: 400}]
  sequence_length: 64
train: {steps: 30, batch_tokens: 256, warmup_steps: 3, save_every: 10, data: DATA}
optimizer: {name: adamw, lr: 0.01}
schedule: cosine
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.replace("DATA", str(folder / "data")))
    prepare(load_recipe(file), folder / "data")
    return file


def run(recipe_file: Path, out: Path, *overrides: str) -> dict:
    return pretrain(load_recipe(recipe_file, overrides), out, quiet=True)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(recipe_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(recipe_file, out)
    return out


@pytest.mark.figures
def test_it_learns_and_leaves_what_scripts_rely_on(whole):
    found = losses(whole)
    assert len(found) == 30 and found[-1] < 0.75 * found[0]
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"step", "loss", "lr", "tokens", "tokens_per_second", "expert_load", "loss/mtp1"} <= line.keys()
    assert line["tokens"] == 30 * 256
    stage = lineage.read(whole)[-1]
    assert stage["stage"] == "train" and stage["steps"] == 30 and stage["recipe"]["train"]["steps"] == 30
    assert stage["loss"] == round(found[-1], 4)  # of the last twentieth, not of what is long past


def test_a_life_has_the_loss_whether_or_not_spikes_are_looked_for(recipe_file, tmp_path):
    summary = run(recipe_file, tmp_path / "run", "train.steps=60", "train.spike.sigmas=0")
    told = lineage.read(tmp_path / "run")[-1]["loss"]
    assert told == round(sum(losses(tmp_path / "run")[-3:]) / 3, 4) == round(summary["loss"], 4)
    run(recipe_file, tmp_path / "run", "train.steps=61", "train.spike.sigmas=0")  # the losses before are read again
    assert lineage.read(tmp_path / "run")[-1]["loss"] == round(sum(losses(tmp_path / "run")[-3:]) / 3, 4)


def test_two_runs_at_once_in_one_directory(recipe_file, tmp_path):
    with exclusive(tmp_path / "run"):
        with pytest.raises(UserError, match="another moesaic is writing here"):
            run(recipe_file, tmp_path / "run")
    assert not (tmp_path / "run").exists()  # nothing came of it
    run(recipe_file, tmp_path / "run", "train.steps=4")
    assert len(losses(tmp_path / "run")) == 4


def test_the_run_is_a_model_directory_of_files(whole):
    assert not any(path.is_symlink() for path in whole.iterdir())
    model = moesaic.load(whole)
    assert len(model.mtp) == 1 and model.tokenizer is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(whole)
    logits = theirs(torch.tensor([[5, 6, 7]])).logits[0]
    torch.testing.assert_close(model.logits([[5, 6, 7]])[0], logits, rtol=1e-3, atol=1e-4)


CALLS_OF_A_SAVE, CALLS_OF_TWO_STEPS = 12_000, 5_000  # of this recipe, about


class Stopped(Exception):
    pass


def stops_at(step: int) -> type[Run]:
    """A run that breaks off after a step, as at a crash."""

    class StopsAt(Run):
        def log_step(self, *arguments):
            super().log_step(*arguments)
            if self.step == step:
                raise Stopped

    return StopsAt


def test_stopped_and_gone_on_with_is_the_same_to_the_bit(recipe_file, whole, tmp_path):
    recipe = load_recipe(recipe_file)
    data = Path(recipe.train.data)
    with pytest.raises(Stopped):
        train(stops_at(17)(recipe, tmp_path / "run", data, quiet=True))
    assert len(losses(tmp_path / "run")) == 17
    run(recipe_file, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)
    assert equal(weights(tmp_path / "run"), weights(whole))


def test_kill_9_at_random_moments_loses_nothing(recipe_file, whole, tmp_path):
    """Ten kills, every other one inside a save, and the end is the same to the bit."""
    out, chance = tmp_path / "run", random.Random(4)
    for kill in range(10):
        inside = bool(kill % 2)
        calls = chance.randrange(CALLS_OF_A_SAVE if inside else CALLS_OF_TWO_STEPS)
        process = killable.start(recipe_file, out, "train.save_every=1", inside=inside, calls=calls)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    run(recipe_file, out, "train.save_every=1")
    assert losses(out) == losses(whole)
    assert equal(weights(out), weights(whole))


@pytest.mark.parametrize(
    "extra",
    [
        ["train.accumulate=3"],
        ["train.recompute=true"],
        ["train.average={kind: weighted, share: 0.5, every: 3}"],
        ["train.token_drop={start: 0.5, share: 0.8}", "train.layer_drop={floor: 0.6}"],
        ["optimizer={name: muon, lr: 0.01}"],
        ["optimizer={name: zero_one_adam, lr: 0.01}"],
        ["balance={sequence_loss: 0.01, z_loss: 0.001}"],
        ["train.embedding_shrink=0.1"],
        ["train.objective={name: blank_infilling}"],
        ["train.offload={delay: true, activations: true}", "train.accumulate=2"],
    ],
    ids=lambda extra: extra[0].split("=")[0] + "=" + extra[0].split("=")[1][:18],
)
def test_every_option_resumes_to_the_same_bits(extra, recipe_file, tmp_path):
    extra = [*extra, "train.steps=12", "train.save_every=4"]
    run(recipe_file, tmp_path / "whole", *extra)
    recipe = load_recipe(recipe_file, extra)

    with pytest.raises(Stopped):
        train(stops_at(10)(recipe, tmp_path / "parts", Path(recipe.train.data), quiet=True))
    run(recipe_file, tmp_path / "parts", *extra)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert all(map(torch.isfinite, map(torch.tensor, losses(tmp_path / "whole"))))


def test_offloaded_state_trains_to_the_same_bits(recipe_file, whole, tmp_path):
    run(recipe_file, tmp_path / "run", "train.offload={speculative: 1, activations: true}", "train.steps=30")
    assert losses(tmp_path / "run") == losses(whole)
    assert equal(weights(tmp_path / "run"), weights(whole))


def test_parts_of_a_batch_add_up(recipe_file, whole, tmp_path):
    run(recipe_file, tmp_path / "run", "train.accumulate=4", "train.steps=5")
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "run")), torch.tensor(losses(whole)[:5]), rtol=2e-3, atol=2e-3
    )


def test_a_run_resumes_in_the_dtype_it_was_started_in_where_another_is_fast(recipe_file, tmp_path, monkeypatch):
    few = ["train.warmup_steps=0", "train.save_every=2", "train.batch_tokens=64"]
    for fast, steps in ((torch.bfloat16, 2), (torch.float32, 4)):  # as on a GPU, and then on a CPU
        monkeypatch.setattr("moesaic.kernels.hardware.dtype", lambda device, stored, fast=fast: fast)
        run(recipe_file, tmp_path / "run", f"train.steps={steps}", *few)
        assert all(
            tensor.dtype == torch.bfloat16 for name, tensor in weights(tmp_path / "run").items() if "norm" in name
        )
    assert len(losses(tmp_path / "run")) == 4


class Killed(Exception):
    pass


@pytest.mark.parametrize("first_fast", [True, False])
def test_killed_before_its_first_checkpoint_a_run_resumes_in_its_dtype(recipe_file, tmp_path, monkeypatch, first_fast):
    """As on a processor with instructions for bfloat16 and then on one without, and the other way round."""
    few = ["train.steps=4", "train.warmup_steps=0", "train.save_every=4", "train.batch_tokens=64"]

    def here(fast: bool) -> None:
        monkeypatch.setattr("moesaic.kernels.hardware.half_is_fast", lambda kind: fast)

    class StopsAt(Run):
        def log_step(self, *arguments):
            super().log_step(*arguments)
            if self.step == 2:
                raise Killed

    here(first_fast)
    run(recipe_file, tmp_path / "whole", *few)
    recipe = load_recipe(recipe_file, few)
    with pytest.raises(Killed):
        train(StopsAt(recipe, tmp_path / "parts", Path(recipe.train.data), quiet=True))
    assert not Checkpoints(tmp_path / "parts", 1, 0).steps()
    here(not first_fast)
    run(recipe_file, tmp_path / "parts", *few)
    kind = "bfloat16" if first_fast else "float32"
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["dtype"] == kind
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_the_dtype_is_reported_with_its_reason_and_can_be_set(recipe_file, tmp_path, monkeypatch, capsys):
    few = ["train.warmup_steps=0", "train.save_every=1", "train.batch_tokens=64"]
    monkeypatch.setattr("moesaic.kernels.hardware.half_is_fast", lambda kind: True)
    pretrain(load_recipe(recipe_file, ["train.steps=1", *few]), tmp_path / "run")
    assert capsys.readouterr().err.startswith("dtype bfloat16, fast on this machine (train.dtype: auto)\n")
    run(recipe_file, tmp_path / "run", "train.steps=2", *few)
    run(recipe_file, tmp_path / "told", "train.steps=1", "train.dtype=float32", *few)
    told = [
        [(event["dtype"], event["text"]) for event in read_events(tmp_path / out) if event["kind"] == "dtype"]
        for out in ("run", "told")
    ]
    assert told[0][1] == ("bfloat16", "dtype bfloat16, as when this run was started")
    assert told[1] == [("float32", "dtype float32, set by train.dtype")]
    assert moesaic.load(tmp_path / "told", dtype="bfloat16").dtype == torch.bfloat16


def test_a_broken_record_of_the_dtype(recipe_file, tmp_path):
    (tmp_path / "run").mkdir()
    for spoilt in ("", "{}", '{"dtype": "float8"}', '{"dtype": ["float32"]}'):
        (tmp_path / "run" / "resolved.json").write_text(spoilt)
        with pytest.raises(UserError, match=r"resolved.json: does not say which dtype.*Remove it"):
            run(recipe_file, tmp_path / "run", "train.steps=1", "train.warmup_steps=0")


def test_averaged_weights_are_the_result(recipe_file, tmp_path):
    options = ["train.average={kind: simple, share: 0.5, every: 1}", "train.steps=6", "train.save_every=1"]
    run(recipe_file, tmp_path / "run", *options, "train.keep_every=1")
    last = load_file(tmp_path / "run" / "checkpoints" / "step-00000006" / "state" / "last.safetensors")
    averaged = [weights(tmp_path / "run" / "checkpoints" / f"step-{n:08}") for n in (3, 4, 5)]
    name, own = "model.norm.weight", "norm.weight"
    expected = torch.stack([*(t[name] for t in averaged), last[own]]).mean(0)
    torch.testing.assert_close(weights(tmp_path / "run")[name], expected)


def test_weights_are_averaged_over_the_last_part_of_a_run_that_was_given_more_steps(recipe_file, tmp_path):
    options = ["train.average={share: 0.5, every: 1}", "train.warmup_steps=1", "train.keep_every=1"]
    run(recipe_file, tmp_path / "run", *options, "train.steps=4", "train.save_every=1")
    run(recipe_file, tmp_path / "run", *options, "train.steps=10", "train.save_every=1")
    last = load_file(tmp_path / "run" / "checkpoints" / "step-00000010" / "state" / "last.safetensors")
    averaged = [weights(tmp_path / "run" / "checkpoints" / f"step-{n:08}") for n in range(5, 10)]
    expected = torch.stack([*(t["model.norm.weight"] for t in averaged), last["norm.weight"]]).mean(0)
    torch.testing.assert_close(weights(tmp_path / "run")["model.norm.weight"], expected)


def test_an_average_of_few_weights_has_the_last_of_them(recipe_file, tmp_path):
    """The last fifth of eleven steps is shorter than the ten that lie between two weights that are taken."""
    options = ["train.steps=11", "train.save_every=1", "train.keep_every=1"]
    run(recipe_file, tmp_path / "run", *options, "train.average={share: 0.2, every: 10}")
    run(recipe_file, tmp_path / "plain", *options)
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "plain"))
    run(recipe_file, tmp_path / "two", *options, "train.average={share: 0.5, every: 3}")
    averaged = [weights(tmp_path / "plain" / "checkpoints" / f"step-{n:08}")["model.norm.weight"] for n in (8, 11)]
    torch.testing.assert_close(weights(tmp_path / "two")["model.norm.weight"], torch.stack(averaged).mean(0))


def test_data_that_is_repeated_past_its_worth_is_told_once(recipe_file, tmp_path):
    options = ["data.sources.0.documents=2", "train.data=null", "train.steps=4", "train.save_every=2"]
    run(recipe_file, tmp_path / "run", *options, "train.warmup_steps=1")
    run(recipe_file, tmp_path / "run", *options, "train.warmup_steps=1", "train.steps=6")
    warnings = [event for event in read_events(tmp_path / "run") if event["kind"] == "warning"]
    assert len(warnings) == 1 and warnings[0]["text"].startswith("sums is repeated")
    run(recipe_file, tmp_path / "enough", "train.steps=4", "train.warmup_steps=1")
    assert not [event for event in read_events(tmp_path / "enough") if event["kind"] == "warning"]


def saves(out: Path) -> list[str]:
    return [event["text"] for event in read_events(out) if event["kind"] == "save"]


def test_a_checkpoint_is_told_of_once_it_is_on_disk(recipe_file, tmp_path, monkeypatch):
    write = Checkpoints._write

    def slowly(self, snapshot):
        assert f"checkpoint of step {snapshot.step} saved" not in saves(tmp_path / "run")
        time.sleep(0.2)  # some steps are taken meanwhile
        return write(self, snapshot)

    monkeypatch.setattr(Checkpoints, "_write", slowly)
    run(recipe_file, tmp_path / "run")
    assert saves(tmp_path / "run") == [f"checkpoint of step {step} saved" for step in (10, 20, 30)]

    def full(self, snapshot):
        if snapshot.step == 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, snapshot)

    monkeypatch.setattr(Checkpoints, "_write", full)
    for steps in (20, 1000):  # the last write fails, or one while the run goes on
        out = tmp_path / f"full{steps}"
        with pytest.raises(OSError, match="No space left"):
            run(recipe_file, out, f"train.steps={steps}", "train.save_every=10")
        assert saves(out) == ["checkpoint of step 10 saved"]
        assert len(losses(out)) <= 30 and load_file(out / "model.safetensors")


def test_keep_last_and_keep_every(recipe_file, tmp_path):
    run(recipe_file, tmp_path / "run", "train.save_every=3", "train.keep_last=2", "train.keep_every=12")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000012", "step-00000024", "step-00000027", "step-00000030"]


def test_a_checkpoint_is_removed_whole_or_not_at_all(recipe_file, tmp_path, monkeypatch):
    options = ["train.steps=6", "train.save_every=2", "train.keep_last=3"]
    run(recipe_file, tmp_path / "run", *options)
    before = weights(tmp_path / "run")

    def killed(path, **options):
        (Path(path) / "state" / "run.json").unlink()
        raise KeyboardInterrupt

    checkpoints = Checkpoints(tmp_path / "run", 3, 0)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.forget(after=2)
    assert checkpoints.steps()[-1] < 6
    run(recipe_file, tmp_path / "run", *options)
    assert equal(weights(tmp_path / "run"), before)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())[0] == "latest"


def test_a_finished_run_that_is_given_more_steps_shows_its_newest_model(recipe_file, tmp_path):
    run(recipe_file, tmp_path, "train.steps=4", "train.warmup_steps=1", "train.save_every=4")
    before = weights(tmp_path)
    run(recipe_file, tmp_path, "train.steps=6", "train.warmup_steps=1", "train.save_every=4")
    assert equal(weights(tmp_path), weights(tmp_path / "checkpoints" / "latest"))
    assert not equal(weights(tmp_path), before)
    assert not any(file.is_symlink() for file in tmp_path.iterdir())
    assert lineage.read(tmp_path)[-1]["steps"] == 6


def test_what_lies_elsewhere_and_is_linked_to_stays_there(recipe_file, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data").symlink_to(load_recipe(recipe_file).train.data)
    summary = run(recipe_file, tmp_path / "run", "train.data=null", "train.steps=2")
    assert summary["outcome"] == "finished" and (tmp_path / "run" / "data").is_symlink()
    assert (tmp_path / "run" / "config.json").is_file() and not (tmp_path / "run" / "config.json").is_symlink()


def test_a_spike_goes_back_past_the_data(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["train.spike={sigmas: 6, patience: 2}", "train.steps=24", "train.save_every=5"])
    seen: list[int] = []

    class Poisoned(Run):
        broken = False

        def forward_backward(self, batch):
            loss = super().forward_backward(batch)
            seen.append(batch.position_after["tokens"])
            if self.step in (13, 14) and not self.broken:
                loss.total = loss.total + 100.0
            return loss

        def rewind(self):
            self.broken = True
            super().rewind()

    poisoned = Poisoned(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
    poisoned.spike_detector.warmup = 5
    train(poisoned)
    assert poisoned.rewinds == 1 and len(losses(tmp_path / "run")) == 24
    assert len(seen) == len(set(seen)), "no data is seen twice"
    stages = [stage for stage in lineage.read(tmp_path / "run") if stage["stage"] == "rewind"]
    assert stages[0]["back_to"] == 10 and stages[0]["spiked_at"] == 16


def test_a_spike_goes_back_before_the_update_that_broke_the_weights(recipe_file, tmp_path):
    options = ["train.spike={sigmas: 6, patience: 2}", "train.steps=16", "train.save_every=5"]
    recipe = load_recipe(recipe_file, [*options, "train.average={share: 0.5, every: 1}"])

    class Broken(Run):
        def optimizer_step(self):
            result = super().optimizer_step()
            if self.step == 10 and not self.rewinds:  # which is saved
                with torch.no_grad():
                    self.model.head.normal_(std=100.0)
            return result

        def rewind(self):
            super().rewind()
            assert not self.average.count, "what was averaged is gone with the steps"

    broken = Broken(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
    broken.spike_detector.warmup = 5
    train(broken)
    assert broken.rewinds == 1 and max(losses(tmp_path / "run")) < 20
    [stage] = [stage for stage in lineage.read(tmp_path / "run") if stage["stage"] == "rewind"]
    assert (stage["back_to"], stage["spiked_at"]) == (5, 13)


# Whether or not losses that are only high are looked for; and the limit itself once, which takes long.
@pytest.mark.parametrize(("sigmas", "limit"), [(8.0, MAX_NONFINITE), (0.0, 6)])
def test_steps_that_are_never_finite_go_back_and_are_not_kept_in_place_of_good_ones(
    sigmas, limit, recipe_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(spike_detection, "MAX_NONFINITE", limit)
    steps = limit + 30
    settings = ["train.save_every=10", "train.spike.max_rewinds=1", f"train.spike.sigmas={sigmas}"]
    recipe = load_recipe(recipe_file, [*settings, f"train.steps={steps}", "train.batch_tokens=64"])

    class Lost(Run):
        until = 1  # rewinds that mend it

        def forward_backward(self, batch):
            loss = super().forward_backward(batch)
            if self.step >= 14 and self.rewinds < self.until:
                self.model.embed.grad[0, 0] = float("inf")
            return loss

    class LostForGood(Lost):
        until = 9

    lost = Lost(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
    train(lost)
    assert lost.rewinds == 1 and lost.summary["skipped"] == 0 and len(losses(tmp_path / "run")) == steps
    [stage] = [stage for stage in lineage.read(tmp_path / "run") if stage["stage"] == "rewind"]
    assert (stage["back_to"], stage["spiked_at"]) == (10, 15 + limit)
    problem = f"{limit} consecutive steps were not finite at step {15 + limit}, after 1 rewinds"
    with pytest.raises(UserError, match=problem):
        train(LostForGood(recipe, tmp_path / "for good", Path(recipe.train.data), quiet=True))
    assert Checkpoints(tmp_path / "for good", 2, 0).steps() == [10]


@pytest.fixture
def few_data(recipe_file) -> list[str]:
    """Data for eight batches of the thirty that are asked for."""
    tokens = Shards(load_recipe(recipe_file).train.data).tokens
    return ["data.when_exhausted=stop", f"data.sources.0.max_epochs={8.5 * 256 / tokens}"]


def test_a_run_ends_where_its_data_does(few_data, recipe_file, tmp_path):
    average = "train.average={share: 0.5, every: 1}"
    summary = run(recipe_file, tmp_path / "run", *few_data, average)
    assert (summary["outcome"], summary["step"], summary["steps"]) == ("finished", 8, 8)
    assert "data ends after 8 steps" in (tmp_path / "run" / "events.jsonl").read_text()
    whole = [json.loads(line)["lr"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert whole[-1] < 0.2 * max(whole), "the schedule has arrived"
    assert (tmp_path / "run" / "checkpoints" / "step-00000008" / "state" / "last.safetensors").exists()
    assert not (tmp_path / "run" / "config.json").is_symlink()
    assert run(recipe_file, tmp_path / "run", *few_data, average)["step"] == 8
    with pytest.raises(UserError, match="not a batch"):
        run(recipe_file, tmp_path / "less", *few_data, "train.batch_tokens=4096")


def test_a_rewind_that_leaves_no_data_ends_the_run(few_data, recipe_file, tmp_path):
    class Rewound(Run):
        def log_step(self, *arguments):
            super().log_step(*arguments)
            if self.step == 6 and not self.rewinds:
                self.rewind()

    recipe = load_recipe(recipe_file, [*few_data, "train.save_every=2"])
    rewound = Rewound(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
    train(rewound)
    assert (rewound.summary["outcome"], rewound.summary["step"]) == ("finished", 6)
    assert moesaic.load(tmp_path / "run") is not None


def test_a_step_that_is_not_finite_is_skipped_and_counted(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["train.steps=6"])

    class Poisoned(Run):
        def forward_backward(self, batch):
            loss = super().forward_backward(batch)
            if self.step == 3:
                self.before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
                self.model.embed.grad[0, 0] = float("nan")
            if self.step == 4:
                assert all(torch.equal(self.before[name], p) for name, p in self.model.named_parameters())
            return loss

    poisoned = Poisoned(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
    train(poisoned)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [False, False, False, True, False, False]
    assert poisoned.summary["skipped"] == 1


def test_distillation_brings_the_student_to_the_teacher(recipe_file, whole, tmp_path):
    options = [f"train.objective={{name: distill, teacher: {whole}, weight: 1.0}}", "model.mtp_layers=0"]
    run(recipe_file, tmp_path / "run", *options)
    found = losses(tmp_path / "run")
    assert found[-1] < 0.5 * found[0]


def test_training_goes_on_from_a_model(recipe_file, whole, tmp_path):
    run(
        recipe_file,
        tmp_path / "run",
        f"train.init={whole}",
        "train.steps=3",
        "train.warmup_steps=0",
        "optimizer.lr=1e-5",
    )
    assert losses(tmp_path / "run")[0] < losses(whole)[5]
    first, second = lineage.read(tmp_path / "run")
    assert first["stage"] == second["stage"] == "train"
    # The second tells of the model it began from, and not of sizes that it has not.
    assert first["recipe"]["model"]["hidden"] == 32 and "model" not in second["recipe"]
    assert second["recipe"]["train"]["init"] == str(whole)


@pytest.fixture(scope="module")
def measured(recipe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    options = [f"train.data={folder}/data", "data.held_out=0.1", "train.steps=6", "train.warmup_steps=0"]
    prepare(load_recipe(recipe_file, options), folder / "data")
    run(recipe_file, folder / "without", *options)
    run(recipe_file, folder / "with", *options, "train.evaluate_every=4", "train.evaluate_tokens=500")
    return folder


class TestHeldOutLoss:
    def test_it_is_that_of_the_model_on_text_held_out(self, measured):
        data = Shards(measured / "data")
        lines = [json.loads(line) for line in (measured / "with" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "loss/held_out" in line] == [4, 6]
        model = moesaic.load(measured / "with")
        held = np.flatnonzero(data.held_out)
        pieces = [piece for n in held for piece in np.split(data.document(n), range(64, data.lengths[n], 64))]
        count = max(1, len(pieces) * 500 // int(data.lengths[held].sum()))
        chosen = np.linspace(0, len(pieces) - 1, count).astype(int)
        per_token = torch.cat(model.logprobs([pieces[n].tolist() for n in chosen]))
        assert lines[-1]["loss/held_out"] == pytest.approx(-float(per_token.mean()), rel=1e-4)

    def test_it_changes_nothing_else(self, measured):
        assert losses(measured / "with") == losses(measured / "without")
        assert equal(weights(measured / "with"), weights(measured / "without"))

    def test_a_law_needs_it(self, measured):
        with pytest.raises(UserError, match="has no loss/held_out.*train.evaluate_every"):
            read_run(measured / "without", HELD_OUT)

    def test_data_without_any(self, recipe_file, tmp_path):
        with pytest.raises(UserError, match="none of the .* documents is held out from training"):
            run(recipe_file, tmp_path / "run", "train.evaluate_every=4")


class TestWhatGoesWrong:
    def test_changed_data_on_resume(self, recipe_file, tmp_path):
        run(recipe_file, tmp_path / "run", "train.steps=2", "train.save_every=1", "train.warmup_steps=0")
        other = load_recipe(recipe_file, ["data.sources.0.documents=300", f"train.data={tmp_path}/other"])
        prepare(other, tmp_path / "other")
        with pytest.raises(UserError, match="not the data that this run was started with"):
            run(recipe_file, tmp_path / "run", f"train.data={tmp_path}/other")
        assert len(losses(tmp_path / "run")) == 2

    def test_a_run_of_a_version_whose_models_had_fewer_keys(self, recipe_file, tmp_path):
        run(recipe_file, tmp_path / "run", "train.steps=2")
        file = tmp_path / "run" / "checkpoints" / "step-00000002" / "state" / "run.json"
        kept = json.loads(file.read_text())
        del kept["recipe"]["model"]["qk_norm"]  # where it is as the recipe has it by default
        file.write_text(json.dumps(kept))
        run(recipe_file, tmp_path / "run", "train.steps=4")
        assert len(losses(tmp_path / "run")) == 4
        kept["recipe"]["model"]["invented"] = 1
        (tmp_path / "run" / "checkpoints" / "step-00000004" / "state" / "run.json").write_text(json.dumps(kept))
        with pytest.raises(UserError, match="another model than the recipe's"):
            run(recipe_file, tmp_path / "run", "train.steps=6")

    def test_fewer_steps_than_were_taken(self, recipe_file, tmp_path):
        few = ["train.warmup_steps=0", "train.save_every=2"]
        run(recipe_file, tmp_path / "run", "train.steps=4", *few)
        with pytest.raises(UserError, match="holds a run of 4 steps, and train.steps is 2"):
            run(recipe_file, tmp_path / "run", "train.steps=2", *few)
        run(recipe_file, tmp_path / "run", "train.steps=4", *few)
        assert len(losses(tmp_path / "run")) == 4

    def test_another_model_in_the_same_directory(self, recipe_file, tmp_path):
        run(recipe_file, tmp_path / "run", "train.steps=2", "train.save_every=1", "train.warmup_steps=0")
        with pytest.raises(UserError, match="another model"):
            run(recipe_file, tmp_path / "run", "model.hidden=48")

    def test_another_seed_than_it_was_begun_with(self, recipe_file, tmp_path):
        few = ["train.save_every=1", "train.warmup_steps=0"]
        run(recipe_file, tmp_path / "run", "train.steps=2", "train.seed=3", *few)
        with pytest.raises(UserError, match="holds a run of seed 3, and 0 is asked for"):
            run(recipe_file, tmp_path / "run", "train.steps=3", *few)
        run(recipe_file, tmp_path / "run", "train.steps=3", "train.seed=3", *few)
        assert len(losses(tmp_path / "run")) == 3

    def test_a_run_that_was_begun_from_other_weights(self, recipe_file, whole, tmp_path):
        few = ["train.steps=2", "train.warmup_steps=0"]
        run(recipe_file, tmp_path / "on", f"train.init={whole}", *few)
        with pytest.raises(UserError, match="was not started from fresh weights"):
            run(recipe_file, tmp_path / "on", *few)
        with pytest.raises(UserError, match="was not started from the weights of"):
            run(recipe_file, tmp_path / "on", f"train.init={tmp_path / 'on'}", *few)
        whole.rename(whole.parent / "moved")
        run(recipe_file, tmp_path / "on", f"train.init={whole.parent / 'moved'}", *few)
        (whole.parent / "moved").rename(whole)

    def test_sizes_that_are_asked_for_beside_a_model_that_has_its_own(self, recipe_file, whole, tmp_path):
        with pytest.raises(UserError, match="command line: model.router: is not used: the model is that of"):
            run(recipe_file, tmp_path / "on", f"train.init={whole}", "model.router.scale=2.5")
        assert not (tmp_path / "on").exists()

    def test_a_model_that_is_no_runs_is_not_written_over(self, recipe_file, whole, tmp_path):
        for name in ("config.json", "model.safetensors"):
            shutil.copy(whole / name, tmp_path / name)
        with pytest.raises(UserError, match="holds a model that no run here has made"):
            run(recipe_file, tmp_path)

    def test_codes_do_not_learn(self, recipe_file, whole, tmp_path):
        assert main(["compress", str(whole), "--out", str(tmp_path / "small"), "--method", "rtn", "bits=4"]) == 0
        with pytest.raises(UserError, match="is quantized, and cannot be trained"):
            run(recipe_file, tmp_path / "on", f"train.init={tmp_path / 'small'}")

    def test_a_model_with_another_vocabulary_of_the_same_size(self, recipe_file, whole, tmp_path):
        text = "The quick brown fox jumps over the lazy dog, again and again, and nothing adds up. "
        (tmp_path / "other.txt").write_text("".join(f"{text}{n:x}" for n in range(2000)))
        options = [f"data.sources=[{{name: other, path: {tmp_path}/other.txt}}]", "model.vocab=400"]
        for name, more in (("other", []), ("same", [f"data.tokenizer={whole}"])):
            prepare(load_recipe(recipe_file, [*options, *more]), tmp_path / name)
        with pytest.raises(UserError, match="another vocabulary than the model .*data.tokenizer="):
            run(recipe_file, tmp_path / "refused", f"train.init={whole}", f"train.data={tmp_path}/other", *options)
        assert not (tmp_path / "refused").exists()
        few = ["train.steps=2", "train.warmup_steps=0", "data.sources.0.name=other"]
        run(recipe_file, tmp_path / "on", f"train.init={whole}", f"train.data={tmp_path}/same", *few)
        assert (tmp_path / "on" / "tokenizer.json").read_bytes() == (whole / "tokenizer.json").read_bytes()

    def test_a_full_disk_keeps_the_last_checkpoint(self, recipe_file, tmp_path, monkeypatch):
        run(recipe_file, tmp_path / "run", "train.steps=4", "train.save_every=2")
        import shutil

        real = shutil.disk_usage
        monkeypatch.setattr("shutil.disk_usage", lambda path: real(path)._replace(free=1000))
        with pytest.raises(UserError, match="are free"):
            run(recipe_file, tmp_path / "run", "train.steps=6", "train.save_every=2")
        monkeypatch.undo()
        assert (tmp_path / "run" / "checkpoints" / "step-00000004").is_dir()
        assert moesaic.load(tmp_path / "run") is not None

    @pytest.mark.parametrize(
        ("file", "content", "problem"),
        [("run.json", "", "is not JSON"), ("run.json", "{}", "has no life"), ("optimizer.safetensors", "", "be read")],
    )
    def test_a_spoilt_checkpoint_can_be_left_out(self, file, content, problem, recipe_file, tmp_path):
        options = ["train.steps=4", "train.save_every=2"]
        run(recipe_file, tmp_path / "run", *options)
        before, spoilt = weights(tmp_path / "run"), tmp_path / "run" / "checkpoints" / "step-00000004"
        (spoilt / "state" / file).write_text(content)
        with pytest.raises(UserError, match=f"{problem}.*Remove this checkpoint to resume from the one before"):
            run(recipe_file, tmp_path / "run", *options)
        shutil.rmtree(spoilt)
        run(recipe_file, tmp_path / "run", *options)
        assert equal(weights(tmp_path / "run"), before)

    def test_a_vanished_shard(self, recipe_file, tmp_path):
        recipe = load_recipe(recipe_file, [f"train.data={tmp_path}/data"])
        prepare(recipe, tmp_path / "data")
        next((tmp_path / "data" / "shards").glob("*.tokens")).unlink()
        with pytest.raises(UserError, match="is missing"):
            pretrain(recipe, tmp_path / "run", quiet=True)

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("model.family=qwen3_moe", "cannot express"),
            ("model.family=gpt2", "from scratch"),
            ("model.kv_heads=3", "do not divide"),
            ("data.sequence_length=65", "65 tokens, and the model's context has 64"),
            ("data.sequence_length=1", "at least 2"),
            ("data.curriculum=nothing", "no such method"),
            ("data.phases=[{share: 0.5, weights: {sums: 1}}]", "shares sum to 0.5"),
            ("data.phases=[{share: 1, weights: {sum: 1}}]", "did you mean sums"),
            (
                "data={quality: null, phases: [{share: 1, weights: {sums: 1}, keep: {sums: 0.5}}], SOURCES}",
                "no such column",
            ),
            ("data.curriculum={name: column, column: grade}", 'no column "grade" for sums'),
            ("data.curriculum={name: multi_domain, column: qality}", "did you mean quality"),
            ("data={quality: null, curriculum: quality, SOURCES}", 'no column "quality"'),
            ("data.curriculum=consistency", 'no column "consistency"'),
            ("data.length_warmup={steps: 5}", "starts at 64 tokens, and data.sequence_length is only 64"),
            ("data.sources=[]", "names no source of text"),
            ("train.batch_tokens=1", "at least 2"),
            ("train.evaluate_every=5", "no text is held out"),
            ("train.seed=18446744073709551616", "less than"),
            ("train.init=nowhere", "no such directory"),
            ("optimizer.lr=1e300", "at most 1000"),
            ("optimizer=adam", "no such method"),
            ("train.warmup_steps=30", "leave none after it"),
            ("schedule={name: cosine, flor: 0.1}", "floor"),
            ("train.objective={name: distill, teacher: nowhere}", "no such directory"),
            ("train={token_drop: {}, steps: 4}", "of 2 layers see every token"),
            ("train.objective=policy", "learns from answers"),
            ("train.objective={name: blank_infilling, mask: '[BLANK]'}", r"no token '\[BLANK\]'"),
            ("train.objective={name: distill, teacher: WHOLE}", "has a vocabulary of 512, the model one of 600"),
            ("train.dtype=fp8", "tensor cores .* this machine has no GPU"),
            ("train={constraint: {name: quantized}, offload: {}, steps: 4}", "holds whole weights"),
            ("data.scores=[repetition, repetition]", "is there twice"),
            ("data.quality={name: perplexity, model: nowhere}", "no such directory"),
            ("data.tokenizer=nowhere", "no such file or directory"),
            ("train.init=WHOLE", "Add data.tokenizer="),
        ],
    )
    def test_a_bad_recipe_is_refused_before_anything_is_done(self, override, problem, recipe_file, whole, tmp_path):
        override = override.replace("WHOLE", str(whole)).replace(
            "SOURCES", "sequence_length: 64, sources: [{name: sums, path: 'builtin:arithmetic'}]"
        )
        with pytest.raises(UserError, match=problem):
            layers = ["model.layers=2"] if "token_drop" in override else []
            layers += ["model.vocab=600"] if "distill" in override else []
            run(recipe_file, tmp_path / "run", override, "train.data=null", *layers)
        assert not (tmp_path / "run").exists()

    def test_a_tokenizer_that_the_model_has_no_room_for_is_refused_at_once(self, recipe_file, tmp_path):
        tokenizer = Path(load_recipe(recipe_file).train.data) / "tokenizer"
        with pytest.raises(UserError, match="model.vocab: 100, but the tokenizer has"):
            run(recipe_file, tmp_path / "run", "train.data=null", f"data.tokenizer={tokenizer}", "model.vocab=100")
        assert not (tmp_path / "run").exists()

    def test_a_model_whose_tokens_the_text_would_not_get_is_refused_at_once(self, recipe_file, whole, tmp_path):
        options = ["train.data=null", f"train.init={whole}", "train.steps=2", "train.warmup_steps=0"]
        with pytest.raises(UserError, match="Add data.tokenizer="):
            run(recipe_file, tmp_path / "run", *options)
        assert not (tmp_path / "run").exists()
        run(recipe_file, tmp_path / "run", *options, f"data.tokenizer={whole}")

    def test_prepared_data_and_no_source_to_draw_from(self, recipe_file, tmp_path):
        with pytest.raises(UserError, match="names no source of text"):
            run(recipe_file, tmp_path / "run", "data.sources=[]")

    def test_a_vocabulary_without_room_for_the_datas_tokens(self, recipe_file, tmp_path):
        with pytest.raises(UserError, match="tokenizer has"):
            run(recipe_file, tmp_path / "run", "model.vocab=100")

    def test_ctrl_c_saves_and_goes_on(self, recipe_file, whole, tmp_path, monkeypatch):
        recipe = load_recipe(recipe_file)

        class Interrupted(Run):
            def log_step(self, *arguments):
                super().log_step(*arguments)
                if self.step == 7:
                    os.kill(os.getpid(), signal.SIGINT)

        interrupted = Interrupted(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
        train(interrupted)
        assert interrupted.summary["outcome"] == "stopped"
        assert interrupted.checkpoints.steps() == [7]
        monkeypatch.setattr("moesaic.train.pretrain.pretrain", lambda *given, **named: interrupted.summary)
        assert main(["train", str(recipe_file), "--out", str(tmp_path / "run")]) == 130
        monkeypatch.undo()
        run(recipe_file, tmp_path / "run")
        assert equal(weights(tmp_path / "run"), weights(whole))

    def test_ctrl_c_in_the_last_step_stops_what_comes_after(self, recipe_file, whole, tmp_path):
        recipe = load_recipe(recipe_file)

        class Interrupted(Run):
            def log_step(self, *arguments):
                super().log_step(*arguments)
                if self.done():
                    os.kill(os.getpid(), signal.SIGINT)

        interrupted = Interrupted(recipe, tmp_path / "run", Path(recipe.train.data), quiet=True)
        with pytest.raises(KeyboardInterrupt):
            train(interrupted)
        assert interrupted.summary["outcome"] == "finished"  # and nothing of it is lost
        assert equal(weights(tmp_path / "run"), weights(whole))


def test_a_run_cut_short_on_the_command_line_has_a_warm_up_that_fits(recipe_file, tmp_path):
    run(recipe_file, tmp_path / "run", "train.steps=2")  # of which the file's warm-up would take 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["lr"] for line in lines] == [0.01, pytest.approx(0.0055)]
    assert "warmup shortened to 0" in (tmp_path / "run" / "events.jsonl").read_text()
    with pytest.raises(UserError, match="leave none after it"):
        run(recipe_file, tmp_path / "other", "train.steps=2", "train.warmup_steps=3")


def test_defaults_are_a_recipe():
    assert Recipe().train.objective.name == "next_token"
