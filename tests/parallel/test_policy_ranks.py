"""RL on several ranks: each samples its share of the completions, and all is as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moesaic.align import align
from moesaic.errors import UserError
from moesaic.train.loop import train
from moesaic.train.report.metrics import read_events, read_metrics
from moesaic.train.run import Run
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import as_rank, assert_as_alone, assert_same, losses
from tests.parallel.test_align_ranks import tune, tune_alone

# Three prompts for two ranks: one of them has nothing left to sample while the other still does.
STAGE = "{{name: policy, steps: 4, lr: 0.003, data: [{{path: 'builtin:sums'}}], prompts: 3, group: 4, max_tokens: 8,"
STAGE += " rewards: [{{name: length, unit: characters, max_length: 3, slack: 20}}], evaluate_every: 1, evaluate: 2,"
STAGE += " save_every: 2{}}}"
VARIANTS = {
    "kl": ", updates: 2, objective: {kl: 0.1, correction: token}",
    "experts": ", temperature: 0.8, top_k: 40, level: sequence",
    "dynamic": ", dynamic: 2, advantage: leave_one_out, drafter: suffix",
    "replay": ", objective: {replay: true}",
    "remember": ", replay_sft: {data: [{path: 'builtin:sums'}], batch_tokens: 128, max_length: 64}",
}
EXACT = {"kl", "experts", "replay"}  # with parallel.exact: the bits of one process
LAYOUTS = {
    "kl": "parallel.zero=3",
    "experts": "parallel.ep=2",
    "dynamic": "parallel.zero=0",
    "replay": "parallel.zero=1",
    "remember": "parallel.zero=2",
}
SHOWN = ("reward", "reward_std", "answer_tokens", "cut_off", "groups", "entropy", "mismatch_max", "accuracy")


def stage(name: str) -> str:
    return STAGE.format(VARIANTS[name])


def on_two(rank: int, world: int, folder: Path) -> None:
    as_rank(rank, world)
    for name, layout in LAYOUTS.items():
        exact = "parallel.exact=true" if name in EXACT else "parallel.exact=false"
        tune(folder / "model", folder / f"{name}-2", layout, exact, stage=stage(name))
    with pytest.MonkeyPatch.context() as patch:  # cut off between two updates from the same completions
        patch.setattr(align, "train", until_step_three)
        tune(folder / "model", folder / "cut-2", LAYOUTS["kl"], "parallel.exact=true", stage=stage("kl"))
    assert len(losses(folder / "cut-2")) == 3
    tune(folder / "model", folder / "cut-2", LAYOUTS["experts"], "parallel.exact=true", stage=stage("kl"))
    refused(folder)


def until_step_three(run: Run) -> None:
    def log_step(*given: Any) -> None:
        run.stopping = run.step == 3
        Run.log_step(run, *given)

    run.log_step = log_step  # type: ignore[method-assign]
    train(run)


def refused(folder: Path) -> None:
    for option, says in {
        "critic: {}": "a critic is trained by one process",
        "selection: {name: cropi, validation: [{path: 'builtin:sums'}]}": "gradients of the whole model",
        "drafter: mtp": "layers, which ranks run together",
        "prompts: 1, group: 3, updates: 2": "Nearest that works: align.stages.0.group=4",
    }.items():
        given = f"{{name: policy, data: [{{path: 'builtin:sums'}}], {option}}}"
        with pytest.raises(UserError, match=says):
            tune(folder / "model", folder / "no", stage=given)


def test_policy_on_two_ranks(tmp_path: Path) -> None:
    tune_alone(tmp_path, {name: stage(name) for name in VARIANTS})
    on_ranks(2, on_two, tmp_path, tmp_path)
    for name in VARIANTS:
        one, two = tmp_path / name, tmp_path / f"{name}-2"
        assert_as_alone(two, one, name in EXACT, SHOWN, 1e-6)
        assert any(losses(one)), "nothing was learned"
        assert [line["mismatch_max"] for line in read_metrics(two)] == [0.0] * 4  # trainer and engine agree to the bit
        assert samples(two) == samples(one) != []

    assert_same(tmp_path / "cut-2", tmp_path / "kl")  # gone on with under another layout


def samples(out: Path) -> list[str]:
    """Completions, with what was asked and the reward, as the log has them."""
    return [event["text"] for event in read_events(out) if event["kind"] == "sample"]
