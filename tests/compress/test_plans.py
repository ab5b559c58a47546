"""Plans of mixed precision: by curvature or first order, for a target, and what they are worth beside chance.

pytest tests/compress/test_plans.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moesaic.cli import main
from moesaic.compress import calibration
from moesaic.compress.first_order import FirstOrder, Step, holds_to
from moesaic.compress.job import Job
from moesaic.compress.layer_store import LayerStore
from moesaic.compress.methods import mixed
from moesaic.compress.methods.mixed import Mixed
from moesaic.compress.plan_search import Budget, Option, choose
from moesaic.compress.sensitivity import Sensitivities
from moesaic.compress.target import builtin_targets, read_target
from moesaic.data.plain_text import builtin_text
from moesaic.errors import UserError
from moesaic.kernels.grid import Grid
from moesaic.model.directory import Parts, load
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.layout import Layout
from tests.compress.made import make


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some matrices matter far more than others: they write ten times as much into the stream."""
    path = make(tmp_path_factory.mktemp("model") / "model", "llama", num_hidden_layers=3)
    tensors = load_file(path / "model.safetensors")
    for name, scale in (
        ("layers.0.mlp.down_proj", 4.0),
        ("layers.1.mlp.down_proj", 0.1),
        ("layers.2.self_attn.o", 0.1),
    ):
        for full in tensors:
            if name in full:
                tensors[full] *= scale
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def job(path: Path) -> Job:
    tokenizer = load(path).tokenizer
    assert tokenizer is not None
    pieces = calibration.sequences(builtin_text(), tokenizer, 4, 128, "test")
    return Job(Parts(open_checkpoint(path)), path, LayerStore(path.parent / "out", {}), pieces, ends_bits=0)


@torch.no_grad()
def divergence(job: Job, bits: dict[str, int]) -> float:
    """Of the next-token distributions from the original's, with each matrix rounded to its bits."""
    model = load(job.source, dtype="float32")

    def distributions() -> torch.Tensor:
        found = [model.logits_at(model(torch.tensor(piece), Layout([len(piece)]))) for piece in job.sequences]
        return torch.cat(found).log_softmax(-1)

    before = distributions()
    parameters = dict(model.named_parameters())
    for name, count in bits.items():
        parameters[name].data.copy_(Grid(count, 32, symmetric=False).rounded(parameters[name].data))
    after = distributions()
    return float((before.exp() * (before - after)).sum(-1).mean())


def test_first_order_holds_near_the_weights_only(job: Job) -> None:
    """Predicted and measured changes of the loss along rounding errors that grow."""
    sensitivities = Sensitivities(job)
    matrices = [(name, weight_OI, parts) for name, weight_OI, parts in sensitivities.matrices() if parts]
    first = FirstOrder(sensitivities.model, [name for name, _, _ in matrices], job.sequences)
    errors = {name: Grid(3, 32, symmetric=False).rounded(w) - w for name, w, _ in matrices}
    before = first.loss()
    steps = first.neighbourhood(errors, 0.0, (1e-2, 1e-1, 4.0))
    assert first.loss() == pytest.approx(before, abs=1e-5)  # weights are back in their place
    for step in steps[:2]:
        assert abs(step.first - step.measured) < 0.1 * abs(step.measured)
    assert holds_to(steps) == 0.1


def test_how_far_a_prediction_held() -> None:
    steps = [Step(0.1, 1.0, 1.0, 1.1), Step(0.5, 5.0, 5.0, 7.0), Step(1.0, 10.0, 10.0, 40.0), Step(2.0, 2.0, 2.0, 2.0)]
    assert holds_to(steps) == 0.5
    assert holds_to(steps[2:]) == 0.0


def test_inputs_are_rounded_where_it_costs_least(job: Job) -> None:
    """Half as many multiplications again in 8 bits: those whose inputs feel it least, not just any."""
    sensitivities = Sensitivities(job)
    costs = {name: sensitivities.input_cost(name) for name, _, parts in sensitivities.matrices() if parts}
    assert min(costs.values()) > 0 and max(costs.values()) > 10 * min(costs.values())
    fresh = replace(job, store=LayerStore(job.source.parent / "inputs", {"of": "inputs"}))
    plan = Mixed(bits=8.0, group=32, target="avx512_vnni", speed=1.7, rounding="rtn")._plan(fresh)
    rounded = {name for name, way in plan.items() if way.inputs == 8}
    assert 0 < len(rounded) < len(plan)
    mean = [sum(costs[name] for name in some) / len(some) for some in (rounded, set(plan) - rounded)]
    assert mean[0] < 0.5 * mean[1]


def test_ranks_are_chosen_beside_bits(job: Job, tmp_path: Path) -> None:
    target = tmp_path / "ranks.yaml"
    target.write_text("multiply: [{weights: 3}, {weights: 3, rank: 8}, {weights: 5}]\n")
    fresh = replace(job, store=LayerStore(tmp_path / "ranks", {"of": "ranks"}))
    method = Mixed(bits=3.8, group=32, target=str(target), rounding="rtn")
    plan = method._plan(fresh)
    assert {way.rank for way in plan.values()} == {0, 8} and method.layouts == ("moesaic",)


def test_the_search_keeps_both_budgets() -> None:
    options = {
        name: [Option(8.0 * weight, 2, 2.0), Option(2.0 * weight, 4, 1.0), Option(1.0 * weight, 8, 3.0)]
        for name, weight in (("a", 1.0), ("b", 3.0), ("c", 0.5))
    }
    assert choose(options, Budget(bits=16)) == {"a": 1, "b": 2, "c": 1}
    assert choose(options, Budget(bits=16, time=3.5)) == {"a": 1, "b": 1, "c": 1}
    with pytest.raises(UserError, match="fits the budget"):
        choose(options, Budget(bits=5))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("multiply: []", "at least 1"),
        ("multiply: [{weights: 7}]", "weights of 7 bits"),
        ("multiply: [{weights: 4, inputs: 4}]", "inputs of 4"),
        ("multiply: [{weights: 4, speed: 2}]", "speed"),
        ("multiply: [{weights: 4, rank: 8, inputs: 8}]", "low rank"),
        ("group: 20\nmultiply: [{weights: 4}]", "multiple of 32"),
        ("- 1", "does not describe a target"),
    ],
)
def test_a_target_that_cannot_be_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "target.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=problem):
        read_target(str(file))


def test_targets_that_come_along() -> None:
    assert builtin_targets() == ["avx512_vnni", "moesaic", "transformers"]
    assert all(read_target(name).multiply for name in builtin_targets())
    with pytest.raises(UserError, match="no such target"):
        read_target("nowhere")


def test_end_to_end_for_a_target_in_a_file(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "board.yaml"
    target.write_text(
        "instruction_set: dotprod\ngroup: 32\nsymmetric: true\n"
        "multiply:\n  - {weights: 4, rate: 1.5}\n  - {weights: 8, inputs: 8, rate: 2.0}\n"
    )
    asked = ["compress", str(path), "--target", str(target), "--out", str(tmp_path / "out"), "--json"]
    wish = ["--samples", "4", "--length", "64", "--check-tokens", "64", "bits=6", "speed=1.7", "rounding=rtn"]
    assert main([*asked, *wish]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plan"]["predicted_speed"] >= 1.7 and 0 < told["plan"]["threshold_gain"] < 1
    matrices = [module for module in load(tmp_path / "out").modules() if isinstance(module, mixed.QuantizedMatrix)]
    inner = [of for of in matrices if of.shape[0] != 320]  # not the embedding and the output matrix
    assert {(of.bits, of.activation_bits, of.group, of.zeros_XGO) for of in inner} == {
        (4, 16, 32, None),
        (8, 8, 32, None),
    }
    assert main([*asked, "--method", "rtn"]) == 2


def test_thresholds_are_worth_searching_for(job: Job) -> None:
    """At the same bits, largest weights clipped where the rest gains."""
    bits = {name: 3 for name, _, _ in Sensitivities(job).matrices()}
    searched = divergence(job, bits)

    def widest(self: Grid, weight_OI: torch.Tensor, importance_I: Any = None) -> Any:
        return honest(replace(self, spans=1), weight_OI, importance_I)

    honest = Grid.fit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grid, "fit", widest)
        assert searched < 0.9 * divergence(job, bits)
