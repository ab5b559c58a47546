"""Whole runs whose tokens cross by nodes, or whose hot experts are copied, beside one process; and a plain PyTorch
model that trains with `ExpertParallel`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.parallel import ExpertParallel
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import as_rank, assert_close, prepared, run

STEPS = ("train.steps=6", "train.save_every=6", "balance.sequence_loss=0.01")
LAYOUTS = ["ep=4 dispatch=node node_ranks=2", "dp=4 ep=2 shadow=1", "ep=2 tp=2 shadow=auto", "ep=4 shadow=3 zero=3"]


def all_layouts(rank: int, world: int, data: Path, folder: Path) -> None:
    as_rank(rank, world)
    for number, layout in enumerate(LAYOUTS):
        given = [f"parallel.{word}" for word in layout.split()]
        run("glm", data, folder / str(number), *STEPS, *given, "train.recompute=true")


def test_runs_are_those_of_one_process(tmp_path: Path) -> None:
    data = prepared(tmp_path / "data")
    run("glm", data, tmp_path / "one", *STEPS, "train.accumulate=4")
    on_ranks(4, all_layouts, tmp_path, data, tmp_path)
    for number, layout in enumerate(LAYOUTS):
        assert_close(tmp_path / str(number), tmp_path / "one", layout)


# A model that is none of this product's: a router and experts of somebody else, in a stack of plain layers.
HIDDEN, EXPERTS, CLASSES, TRAINED = 12, 4, 5, 6


class Classifier(nn.Module):
    def __init__(self, experts: list[nn.Module]) -> None:
        super().__init__()
        self.enter, self.router = nn.Linear(8, HIDDEN), nn.Linear(HIDDEN, EXPERTS)
        self.mixture = ExpertParallel(experts) if len(experts) < EXPERTS else nn.ModuleList(experts)
        self.leave = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x_TI: Tensor) -> Tensor:
        x_TD = self.enter(x_TI).relu()
        weights_TK, chosen_TK = self.router(x_TD).softmax(-1).topk(2)
        if isinstance(self.mixture, ExpertParallel):
            return self.leave(x_TD + self.mixture(x_TD, chosen_TK, weights_TK))
        all_TED = torch.stack([expert(x_TD) for expert in self.mixture], 1)
        picked_TKD = all_TED.gather(1, chosen_TK.unsqueeze(-1).expand(-1, -1, HIDDEN))
        return self.leave(x_TD + (picked_TKD * weights_TK.unsqueeze(-1)).sum(1))


def classifier(held: range) -> Classifier:
    torch.manual_seed(4)
    experts = [nn.Sequential(nn.Linear(HIDDEN, 20), nn.GELU(), nn.Linear(20, HIDDEN)) for _ in range(EXPERTS)]
    torch.manual_seed(5)
    return Classifier([experts[number] for number in held])


def train(model: Classifier, ranks: list[int], shared_over: int) -> list[float]:
    """On the data of these ranks; what every rank holds is reduced over so many."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4), []
    for step in range(TRAINED):
        generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
        x_TI = torch.cat([torch.randn(30, 8, generator=generator) for generator in generators])
        loss = nn.functional.cross_entropy(model(x_TI), x_TI.abs()[:, :CLASSES].argmax(1), reduction="sum") / 60
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach()
        if shared_over > 1:
            dist.all_reduce(total)
            for name, parameter in model.named_parameters():
                if not name.startswith("mixture."):
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(float(total))
    return losses


def drop_in(rank: int, world: int) -> None:
    here = EXPERTS // world
    held = range(rank * here, (rank + 1) * here)
    model, alone = classifier(held), classifier(range(EXPERTS))
    losses, expected = train(model, [rank], world), train(alone, list(range(world)), 1)
    assert losses == pytest.approx(expected, rel=1e-5) and expected[-1] < expected[0]
    for name, parameter in model.named_parameters():
        path = name.split(".")
        if path[0] == "mixture":  # mixture.experts.0.2.weight: the expert's number among all
            path = ["mixture", str(held[int(path[2])]), *path[3:]]
        torch.testing.assert_close(parameter, alone.get_parameter(".".join(path)), rtol=1e-4, atol=1e-5)


def test_a_plain_model_trains_as_in_one_process(tmp_path: Path) -> None:
    on_ranks(2, drop_in, tmp_path)
