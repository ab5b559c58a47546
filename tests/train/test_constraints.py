"""Constraints: weights end in the form they are held to, runs resume to the bit, and ADMM beats pruning first."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moesaic.errors import UserError
from moesaic.kernels.fake_quantization import rounded_by
from moesaic.kernels.grid import Grid
from moesaic.methods import Method
from moesaic.model.context import Routing
from moesaic.model.matrices import matrix_parameters
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.train.constraints.iss import HeldUnits, IntrinsicSparseStructures, Network
from moesaic.train.constraints.nm import NM, Alternating, Form
from moesaic.train.constraints.quantized import Quantized
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.optimizers.adamw import AdamW
from moesaic.train.validate import check
from tests.matrix import CONSTRAINTS
from tests.train.tiny_runs import CONFIG, RuleStream, batch, loss_of, trained


@pytest.mark.parametrize("name", CONSTRAINTS)
class TestEveryConstraint:
    def test_a_killed_run_goes_on_to_the_same_weights(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = {"constraint": Method(name, CONSTRAINTS[name]), "save_every": 3}
        model = Model(CONFIG).initialize(0)
        whole = trained(model, tmp_path / "whole", 1, 8, **settings)
        honest = RuleStream.__next__

        def dies(stream: RuleStream) -> Any:
            if stream.step == 7:
                raise KeyboardInterrupt
            return honest(stream)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(RuleStream, "__next__", dies)
            trained(model, tmp_path / "part", 1, 8, **settings)
        again = trained(model, tmp_path / "part", 1, 8, **settings)
        for key, tensor in whole.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[key]), key

    def test_a_recipe_may_name_it(self, name: str, tmp_path: Path) -> None:
        file = tmp_path / "recipe.yaml"
        file.write_text("data: {sequence_length: 64, sources: [{name: sums, path: 'builtin:sums'}]}\n")
        options = json.dumps({"name": name, **CONSTRAINTS[name]})
        check(load_recipe(file, [f"train.constraint={options}"]))
        with pytest.raises(UserError, match=r"train\.average"):
            check(load_recipe(file, [f"train.constraint={options}", "train.average={share: 0.2}"]))


def test_a_quantized_forward_is_that_of_the_rounded_weights() -> None:
    model = Model(CONFIG).initialize(0)
    rounded, grid = copy.deepcopy(model), Grid(2, 32, ternary=True)
    with torch.no_grad():
        for name, parameter in rounded.layers.named_parameters():
            if name in matrix_parameters(rounded.layers):
                parameter.copy_(rounded_by(grid, parameter))
                levels = parameter.flatten(0, -2)[0][:32].unique()
                assert len(levels) <= 3 and float(levels[0]) == -float(levels[-1])
    optimizer = AdamW().build(model.named_parameters())
    Quantized(bits=2, group=32, ternary=True).build(model, optimizer, 10)
    assert loss_of(model, 1, 1) == pytest.approx(loss_of(rounded, 1, 1), rel=1e-5)
    examples = batch(1, 0)
    NextToken()(model, examples, Routing()).total.backward()
    gradient = model.layers[1].ffn.down_EDF.grad  # type: ignore[union-attr]
    assert gradient is not None and float(gradient.abs().sum()) > 0


def test_weights_trained_under_nm_are_nm(tmp_path: Path) -> None:
    model = trained(
        Model(CONFIG).initialize(0), tmp_path / "run", 1, 8, constraint=Method("nm", {"n": 1, "m": 4, "every": 2})
    )
    names = matrix_parameters(model.layers)
    assert any("gate_up_EGD" in name for name in names)
    for name, parameter in model.layers.named_parameters():
        if name in names:
            left = (parameter.unflatten(-1, (-1, 4)) != 0).sum(-1)
            assert int(left.max()) == 1, name
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[2]["constraint/gap"] > 0.1 and metrics[-1]["constraint/gap"] == 0


def fitted(options: NM, seed: int, steps: int = 300, lr: float = 0.02) -> float:
    """What is left of a linear map's outputs, as a share, when it is trained under a constraint: inputs come from half
    as many causes, and are of different sizes, as hidden states are."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(32, 16, generator=generator)
    size_I = torch.exp(0.7 * torch.randn(32, generator=generator))
    moments_II = (mix @ mix.T / 16 + 0.05 * torch.eye(32)) * size_I * size_I[:, None]
    true_OI = torch.randn(16, 32, generator=generator) / size_I
    weight_OI = nn.Parameter(true_OI.clone())
    optimizer = AdamW(lr=lr, weight_decay=0.0).build([("weight", weight_OI)])
    held = Alternating(options, {"weight": (optimizer.slots[0], Form(options.n, options.m, None))}, steps)

    def loss() -> torch.Tensor:
        off_OI = weight_OI - true_OI
        return (off_OI @ moments_II * off_OI).sum() / (true_OI @ moments_II * true_OI).sum()

    for step in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step(1 - step / steps, clip=1e9)
        held.after_step(step + 1, lr * (1 - step / steps))
    assert int((weight_OI.unflatten(1, (-1, options.m)) != 0).sum(-1).max()) == options.n
    return float(loss().detach())


@pytest.mark.parametrize("seed", [0, 1])
def test_admm_beats_pruning_by_magnitude_before_as_many_steps(seed: int) -> None:
    admm, pruned_first = fitted(NM(), seed), fitted(NM(rho=0.0, settle=1.0), seed)
    assert admm < 0.6 * pruned_first
    assert admm < 0.4 * fitted(NM(rho=0.0), seed)  # without the pull, what is cut off at once costs more


def narrowed(options: IntrinsicSparseStructures, seed: int, steps: int = 300, lr: float = 0.01) -> float:
    """What is left to explain of a network of 16 units by one of 32, in which every unit is there twice, slightly
    otherwise: half of them have to go."""
    units, width = 16, 16
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def out(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, 1)
        return (F.silu(gate) * up) @ down.T

    true_gate_up, true_down = drawn(2 * units, width) / width**0.5, drawn(width, units) / units**0.5
    twice = true_gate_up.unflatten(0, (2, -1)).repeat(1, 2, 1).flatten(0, 1)
    gate_up = nn.Parameter(twice + 0.3 * drawn(4 * units, width) / width**0.5)
    down = nn.Parameter(torch.cat([true_down, true_down], 1) / 2 * (1 + 0.3 * drawn(width, 2 * units)))
    optimizer = AdamW(lr=lr, weight_decay=0.0).build([("gate_up", gate_up), ("down", down)])
    slots = {slot.name: slot for slot in optimizer.slots}
    held = HeldUnits(options, [Network("network", slots["gate_up"], slots["down"])], steps)
    x_TD, unseen_TD = drawn(512, width), drawn(512, width)

    def loss(x: torch.Tensor) -> torch.Tensor:
        wanted = out(x, true_gate_up, true_down)
        return (out(x, gate_up, down) - wanted).square().sum() / wanted.square().sum()

    for step in range(steps):
        optimizer.zero_grad()
        loss(x_TD).backward()
        optimizer.step(1 - step / steps, clip=1e9)
        held.after_step(step + 1, lr * (1 - step / steps))
    assert int((down.norm(dim=0) > 0).sum()) == units
    return float(loss(unseen_TD).detach())


def test_a_group_lasso_makes_units_that_stay_learn_what_others_did() -> None:
    seeds = range(3)
    learned = sum(narrowed(IntrinsicSparseStructures(), seed) for seed in seeds)
    assert learned < 0.6 * sum(narrowed(IntrinsicSparseStructures(penalty=0.0), seed) for seed in seeds)
