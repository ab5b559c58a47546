"""Dispatch by nodes: four processes as two nodes of two, beside one process; what crosses between nodes, counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels import reference
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from moesaic.parallel.experts.nodes import NodeExchange, expected_crossings
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.mesh import ParallelMesh
from moesaic.train.ranks import check_parallel
from tests.parallel.ranks import on_ranks
from tests.parallel.small_runs import recipe_of
from tests.parallel.test_seams import model_of

HIDDEN, WIDTH, EXPERTS, PER_TOKEN, NODES, LOCAL = 16, 12, 8, 4, 2, 2


def all_weights(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(EXPERTS, 2 * width, HIDDEN, generator=generator) / 4,
        torch.randn(EXPERTS, HIDDEN, width, generator=generator) / 4,
    )


def work(rank: int, tokens: int) -> tuple[Tensor, Routes]:
    generator = torch.Generator().manual_seed(20 + rank)
    x_TD = torch.randn(tokens, HIDDEN, generator=generator)
    experts_TK = torch.rand(tokens, EXPERTS, generator=generator).topk(PER_TOKEN).indices
    return x_TD, Routes(experts_TK, torch.rand(tokens, PER_TOKEN, generator=generator))


def by_node(rank: int, world: int) -> None:
    mesh = ParallelMesh(ParallelLayout(dp=world, ep=world), torch.device("cpu"))
    nodes = NodeExchange(*(Exchange(group) for group in mesh.nodes(LOCAL)))
    assert dist.get_process_group_ranks(nodes.between.group) == [rank % LOCAL, rank % LOCAL + LOCAL]
    ops = ExpertParallelKernels(reference, Exchange(mesh.group("ep")), dispatch="node", nodes=nodes)  # type: ignore[arg-type]
    tokens = [600, 0, 5, 300]  # of each rank: one has none
    given = [work(number, tokens[number]) for number in range(world)]
    x_TD, routes = given[rank]
    x_TD, here = x_TD.clone().requires_grad_(), EXPERTS // world
    own = [nn.Parameter(part.chunk(world)[rank].clone()) for part in all_weights()]
    y_TD = ops.experts(x_TD, routes, ExpertWeights(own[0], own[1], "silu"))
    (y_TD * torch.arange(1, HIDDEN + 1)).sum().backward()

    whole = [nn.Parameter(part) for part in all_weights()]
    rows = [x.clone().requires_grad_() for x, _ in given]
    choices, shares = (torch.cat([getattr(routes, name) for _, routes in given]) for name in Routes._fields)
    expected_TD = reference.experts(torch.cat(rows), Routes(choices, shares), ExpertWeights(whole[0], whole[1], "silu"))
    (expected_TD * torch.arange(1, HIDDEN + 1)).sum().backward()
    assert apart(y_TD.detach(), expected_TD.detach().split(tokens)[rank]) < 1e-5
    assert x_TD.grad is not None and rows[rank].grad is not None and apart(x_TD.grad, rows[rank].grad) < 1e-5
    for mine, all_experts in zip(own, whole, strict=True):
        assert mine.grad is not None and all_experts.grad is not None
        assert apart(mine.grad, all_experts.grad.chunk(world)[rank]) < 1e-5

    # Between nodes: a row for each pair of a token and another node that it needs, there and back.
    node, row = rank // LOCAL, 4 * HIDDEN
    nodes_of = [routes.experts_TK // (here * LOCAL) for _, routes in given]
    pairs = sum(len(set(line) - {node}) for line in nodes_of[rank].tolist())
    partner = nodes_of[(rank + LOCAL) % world]
    back = sum(node in line for line in partner.tolist())
    asked = int((nodes_of[rank] != node).sum())
    assert nodes.between.sent_bytes == (pairs + back) * row + asked * (4 + 8)  # a weight, and which expert of which row
    if rank == 0:  # beside plain dispatch, as random routing predicts
        less = expected_crossings(EXPERTS, PER_TOKEN, NODES, True) / expected_crossings(
            EXPERTS, PER_TOKEN, NODES, False
        )
        assert abs(pairs / asked - less) < 0.02 * less


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-6))


def test_two_nodes_of_two(tmp_path: Path) -> None:
    on_ranks(NODES * LOCAL, by_node, tmp_path)


def test_expected_crossings() -> None:
    # 8 experts, 4 of each token, 2 nodes: 2 rows cross, or 1 unless all 4 are at home (1 of 70 choices).
    assert expected_crossings(8, 4, 2, once=False) == 2
    assert expected_crossings(8, 4, 2, once=True) == pytest.approx(69 / 70)
    # DeepSeek-V3 on 8 nodes, if routing were not limited: 8 experts of 256 reach 4.6 other nodes.
    assert expected_crossings(256, 8, 8, once=False) == 7
    assert expected_crossings(256, 8, 8, once=True) == pytest.approx(4.63, abs=0.01)


def test_what_does_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_of(experts=8).config
    for key, value in {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(key, value)
    given = ("parallel.ep=2", "parallel.dispatch=node", "train.batch_tokens=4096")
    with pytest.raises(UserError, match="not whole nodes of 3"):
        check_parallel(recipe_of("glm", *given), config)
    check_parallel(recipe_of("glm", *given, "parallel.node_ranks=2"), config)
    with pytest.raises(UserError, match="adds up a token's experts by node first"):
        check_parallel(recipe_of("glm", *given, "parallel.node_ranks=2", "parallel.exact=true"), config)
    with pytest.raises(UserError, match=r"parallel\.shadow.*stay at home"):
        check_parallel(recipe_of("glm", *given, "parallel.node_ranks=2", "parallel.shadow=auto"), config)
