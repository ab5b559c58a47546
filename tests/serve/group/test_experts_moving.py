"""Experts with copies on several ranks, moved between two steps to where the load is: nobody notices but the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.errors import UserError
from moesaic.parallel.experts.placement import Move, SlotPlan, after, plan_slots
from moesaic.serve.group.experts.choice import Holders, add_in_order
from moesaic.serve.group.experts.rebalancing import ExpertOptions, Rebalancer, read_changes, write_changes
from moesaic.serve.group.experts.slots import ExpertReader, LayerExperts
from moesaic.serve.group.step_array import Reader
from tests.serve.group.groups import Asked, Case, alone, answers, in_groups, model_directory, some_requests

OPTIONS = {"page_size": 4, "cache_bytes": 2**21}


def skewed_requests(count: int = 6) -> list[Asked]:
    """Long answers to prompts that say the same thing again and again: a few experts have most of the tokens."""
    asked = some_requests(count, tokens=24)
    for number, one in enumerate(asked):
        one["prompt"] = [17 + number % 2] * 20
        one["sampling"]["max_tokens"] = 24
    return asked


def moving(engine: Any, asked: list[Asked]) -> dict[str, Any]:
    found = answers(engine, asked)
    rounds, slots = engine.rebalancer.rounds, engine.slots
    ffn = engine.model.layers[slots.reader.layers[0]].ffn
    return {
        "answers": found,
        "rounds": [list(one) for one in rounds],
        "sent": engine.group.traffic.bytes["experts"],
        "slots": len(ffn.gate_up_EGD),
        "expert": (ffn.gate_up_EGD[0].numel() + ffn.down_EDF[0].numel()) * 4,
        "plans": {str(layer): plan.slots for layer, plan in slots.plans.items()},
    }


def test_experts_move_in_the_middle_of_requests(tmp_path: Path) -> None:
    """On two and four ranks; with and without copies; the tokens and bits of one process. What is measured after a move
    is more even than before, and no more was sent than the experts that moved."""
    asked = skewed_requests()
    cases, expected = [], []
    for kind, layout, copies in (
        ("qwen3_moe", "tp=2 ep=2", 2),
        ("qwen3_moe", "ep=2", 1),
        ("glm4_moe", "tp=2 ep=4", 1),
        ("deepseek_v3", "tp=2 ep=2", 0),
    ):
        directory = tmp_path / kind
        if not directory.exists():
            model_directory(kind, directory)
        more = OPTIONS | {"expert_replicas": copies, "rebalance_steps": 5}
        cases.append(Case(layout, directory, moving, asked, **more))
        expected.append(alone(directory, asked, **OPTIONS))
    for case, found, theirs in zip(cases, in_groups(cases, tmp_path), expected, strict=True):
        assert found["answers"] == theirs, case.layout
        first, *later = found["rounds"]
        assert first[3] > 0 and len(later) >= 2, "experts moved, and were looked at again"
        ranks, copies = (4 if "ep=4" in case.layout else 2), case.options["expert_replicas"]
        assert found["slots"] == 8 // ranks + copies
        assert found["sent"] <= sum(one[3] for one in found["rounds"]) * found["expert"]
        assert found["sent"] % found["expert"] == 0
        if copies:
            measured = [before for _, before, _, _ in later]
            assert sum(measured) / len(measured) < first[1], f"{case.layout}: {found['rounds']}"
        for slots in found["plans"].values():
            assert {expert for own in slots for expert in own} == set(range(8))


def test_copies_take_turns() -> None:
    holders = Holders(SlotPlan(((0, 1, 3), (0, 2, 3), (0, 1, 2))), 4)
    experts_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    chosen = holders.choose(experts_TK, 0)
    assert chosen[:, 0].tolist() == [0, 1, 2, 0] and chosen[:, 1].tolist() == [0, 1, 0, 2]
    later = holders.choose(experts_TK, 1)
    assert later[:, 0].tolist() == [1, 2, 0, 1], "a single row does not always go to the same copy"
    for turn in range(5):
        chosen = holders.choose(experts_TK, turn)
        for expert, rank in zip(experts_TK.flatten().tolist(), chosen.flatten().tolist(), strict=True):
            assert expert in holders.plan.slots[rank]


@pytest.mark.parametrize("seed", range(4))
def test_turns_spread_load_as_the_plan_says(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    popular_E = torch.rand(16, generator=generator) ** 4
    experts_TK = torch.multinomial(popular_E.expand(4096, 16), 4, generator=generator)
    loads = torch.bincount(experts_TK.flatten(), minlength=16).tolist()
    plan = plan_slots(loads, 4, 6)
    rows_R = torch.bincount(Holders(plan, 16).choose(experts_TK, seed).flatten(), minlength=4)
    expected_R = torch.tensor(plan.loads(loads))
    assert (rows_R - expected_R).abs().max() <= 6  # an expert's rows divide among copies with at most one left


def test_sums_are_in_the_order_of_experts() -> None:
    y_TKD = torch.tensor([[[1e8], [1.0], [-1e8]]])
    assert add_in_order(y_TKD, torch.tensor([[0, 1, 2]])).item() == 0.0  # (1e8 + 1) - 1e8 in float32
    assert add_in_order(y_TKD, torch.tensor([[0, 2, 1]])).item() == 1.0


def test_changes_travel_as_numbers() -> None:
    changes = {3: [Move(0, 1, 7, 2), Move(1, 0, 4, None)], 9: [Move(2, 2, 0, 0)]}
    assert read_changes(Reader(write_changes(changes))) == changes


def test_slots_hold_what_they_are_told(tmp_path: Path) -> None:
    directory = model_directory("qwen3_moe", tmp_path / "model")
    reader = ExpertReader(directory, torch.float32, torch.device("cpu"))
    held = LayerExperts(reader, 1, [0, 3, 5])
    assert reader.read_experts == 3
    assert held.keep([3, 6, 5, 7]) == 2 and sorted(held.held) == [3, 5, 6, 7] and reader.read_experts == 5
    assert held.keep([7]) == 0 and held.held == [7]
    slots_A = held.slots_of(torch.tensor([7, 2, 7]))
    assert slots_A.tolist() == [0, 1, 0] and held.held == [7, 2]
    for slot, expert in enumerate(held.held):
        read = reader.read(1, expert)
        assert torch.equal(held.weights.gate_up_EGD[slot], read.gate_up_GD)
        assert torch.equal(held.weights.down_EDF[slot], read.down_DF)
    assert held.bytes == 2 * (read.gate_up_GD.numel() + read.down_DF.numel()) * 4


def test_options() -> None:
    found, rest = ExpertOptions.taken_from({"expert_replicas": 2, "rebalance_steps": 50, "seed": 1})
    assert found == ExpertOptions(2, 50) and found and rest == {"seed": 1}
    assert not ExpertOptions.taken_from({"expert_replicas": None})[0]
    with pytest.raises(UserError, match="at least 0"):
        ExpertOptions.taken_from({"rebalance_steps": -1})


def test_layers_are_changed_one_by_one_after_a_look() -> None:
    """Six layers in three steps, two in each; the round is written when the last is done, and loads are since then."""

    class Counted:
        def __init__(self) -> None:
            self.total = {layer: [0] * 4 for layer in range(6)}

        def by_layer(self) -> dict[int, list[int]]:
            return {layer: list(loads) for layer, loads in self.total.items()}

    counted, plans, applied = Counted(), {layer: SlotPlan(((0, 1), (2, 3))) for layer in range(6)}, list[int]()

    def apply(changes: Any) -> None:
        for layer, moves in changes.items():
            plans[layer] = after(plans[layer], moves)
            applied.append(layer)

    balancer = Rebalancer(counted, lambda: plans, apply, steps=3)  # type: ignore[arg-type]
    seen = []
    for _ in range(10):
        balancer.before_step()
        seen.append(list(applied))
        for loads in counted.total.values():
            for expert, more in enumerate((10, 8, 1, 1)):
                loads[expert] += more
    assert [len(one) for one in seen] == [0, 0, 0, 2, 4, 6, 6, 6, 6, 6]
    first, second = balancer.rounds
    assert (first.step, first.moves) == (5, 12) and first.before == pytest.approx(1.8)
    assert first.after == second.before == second.after == pytest.approx(1.1) and second.moves == 0
