"""Experts on other ranks beside all of them in one process: outputs, gradients and bytes, on two and four processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.interface import Dispatched, Routes
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.experts import MixtureFeedForward
from moesaic.parallel import ExpertParallel
from moesaic.parallel.experts.dispatch import _bounds, _by_expert, _segments, begin_experts
from moesaic.parallel.experts.exchange import Exchange, RowsUnderWay
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from tests.parallel.ranks import on_ranks
from tests.parallel.test_seams import loss_of, model_of

HIDDEN, EXPERTS, PER_TOKEN, TOKENS = 16, 8, 3, 24


def expert(number: int) -> nn.Module:
    torch.manual_seed(100 + number)
    return nn.Sequential(nn.Linear(HIDDEN, 20), nn.GELU(), nn.Linear(20, HIDDEN))


def work(rank: int, how: str) -> tuple[Tensor, Routes]:
    """One rank's tokens and their experts: as they come, all to two experts (the others are empty), or none at all."""
    generator = torch.Generator().manual_seed(7 + rank)
    tokens = 0 if how == "idle rank" and rank == 0 else TOKENS + 3 * rank
    x_TD = torch.randn(tokens, HIDDEN, generator=generator)
    if how == "imbalanced":
        experts_TK = torch.tensor([1, 6, 5]).expand(tokens, -1).contiguous()
    else:
        scores_TE = torch.rand(tokens, EXPERTS, generator=generator)
        experts_TK = scores_TE.topk(PER_TOKEN).indices
    return x_TD, Routes(experts_TK, torch.rand(tokens, PER_TOKEN, generator=generator))


def alone(world: int, how: str) -> tuple[Tensor, Tensor, nn.ModuleList]:
    """All ranks' tokens in one process: outputs, gradients of the rows, and the experts with theirs."""
    given = [work(rank, how) for rank in range(world)]
    x_TD = torch.cat([x for x, _ in given]).requires_grad_()
    experts_TK = torch.cat([routes.experts_TK for _, routes in given])
    weights_TK = torch.cat([routes.weights_TK for _, routes in given])
    experts = nn.ModuleList(expert(number) for number in range(EXPERTS))
    token_A = torch.arange(len(x_TD)).repeat_interleave(PER_TOKEN)
    column_A = torch.arange(PER_TOKEN).repeat(len(x_TD))
    order_A = experts_TK.reshape(-1).argsort(stable=True)
    token_A, column_A = token_A[order_A], column_A[order_A]
    counts = torch.bincount(experts_TK.reshape(-1), minlength=EXPERTS).tolist()
    parts = x_TD.index_select(0, token_A).split(counts)
    y_AD = torch.cat([one(part) for one, part in zip(experts, parts)]) * weights_TK[token_A, column_A].unsqueeze(1)
    y_TD = torch.zeros_like(x_TD).index_add(0, token_A, y_AD)
    (y_TD * torch.arange(1, HIDDEN + 1)).sum().backward()
    assert x_TD.grad is not None
    return y_TD.detach(), x_TD.grad, experts


def close(found: Tensor, expected: Tensor) -> bool:
    """As a whole: single numbers are differences of large ones, whose rounding is theirs."""
    return bool((found - expected).norm() <= 1e-6 * expected.norm())


def drop_in(rank: int, world: int, how: str, chunks: int, dispatch: str) -> None:
    here = EXPERTS // world
    layer = ExpertParallel(
        [expert(number) for number in range(rank * here, (rank + 1) * here)],
        chunks=chunks,
        dispatch=dispatch,
        node_ranks=2,
    )
    x_TD, routes = work(rank, how)
    x_TD.requires_grad_()
    y_TD = layer(x_TD, *routes)
    (y_TD * torch.arange(1, HIDDEN + 1)).sum().backward()

    expected_TD, gradient_TD, experts = alone(world, how)
    begin = sum(len(work(other, how)[0]) for other in range(rank))
    mine = slice(begin, begin + len(x_TD))
    assert x_TD.grad is not None
    same = torch.equal if dispatch == "plain" else close
    assert same(y_TD.detach(), expected_TD[mine])
    assert same(x_TD.grad, gradient_TD[mine])
    for number, own in enumerate(layer.experts):
        for parameter, other in zip(own.parameters(), experts[rank * here + number].parameters()):
            if other.grad is None:
                assert parameter.grad is None or not parameter.grad.any()
            else:
                # Sent once per rank, an expert's rows still come in order; by way of a node's ranks they do not.
                alike = close if dispatch == "node" else torch.equal
                assert parameter.grad is not None and alike(parameter.grad, other.grad)

    # Bytes: every assignment whose expert is elsewhere, or each token once per rank that needs it; there and back.
    ranks_TK = routes.experts_TK // here
    row = 4 * HIDDEN
    if dispatch == "plain":
        away = int((ranks_TK != rank).sum())
        arrived = sum(
            int((work(other, how)[1].experts_TK // here == rank).sum()) for other in range(world) if other != rank
        )
        assert layer.exchange.sent_bytes == away * (row + 4) + arrived * row
    elif dispatch == "once":
        pairs = sum(len(set(line) - {rank}) for line in ranks_TK.tolist())
        others = [work(other, how)[1].experts_TK // here for other in range(world) if other != rank]
        back = sum(rank in line for table in others for line in table.tolist())
        wanted = int((ranks_TK != rank).sum())
        assert layer.exchange.sent_bytes == (pairs + back) * row + wanted * (4 + 8)


def every_way(rank: int, world: int) -> None:
    for how in ("as they come", "imbalanced", "idle rank"):
        for chunks, dispatch in ((1, "plain"), (2, "plain"), (3, "plain"), (1, "once"), (2, "node")):
            try:
                drop_in(rank, world, how, chunks, dispatch)
            except AssertionError as error:
                raise AssertionError(f"{how}, {chunks} chunks, {dispatch}, rank {rank}") from error


@pytest.mark.parametrize("world", [2, 4])
def test_any_experts_on_ranks(world: int, tmp_path: Path) -> None:
    """In order they give one process's bits, forward and backward, overlapped too; summed by rank, its numbers."""
    on_ranks(world, every_way, tmp_path)


def own_model(rank: int, world: int) -> None:
    """The product's model: the loss to the bit, though experts see others' tokens too; gradients within rounding."""
    own_model_in(rank, world, chunks=1, shared=0)
    own_model_in(rank, world, chunks=2, shared=1)


class Sequential(WrappedKernels):
    """Kernels that say themselves what experts are: nothing is begun before, and the shared expert waits."""

    def experts(self, *given: Any) -> Tensor:
        return self.plain.experts(*given)


def own_model_in(rank: int, world: int, chunks: int, shared: int) -> None:
    single = model_of(experts=8, shared=shared)
    model = copy.deepcopy(single)
    for block in model.layers:
        assert isinstance(block.ffn, MixtureFeedForward)
        for name in ("gate_up_EGD", "down_EDF"):
            own = getattr(block.ffn, name).detach().chunk(world)[rank].clone()
            setattr(block.ffn, name, nn.Parameter(own))
    exchange = Exchange()
    model.ops = ExpertParallelKernels(model.ops, exchange, chunks=chunks)  # type: ignore[assignment]
    alone_loss = loss_of(single, rank, 1.0)
    loss = loss_of(model, rank, 1.0)
    assert torch.equal(loss, alone_loss)  # a token's result does not depend on what else its experts compute
    loss.backward()
    assert exchange.sent_bytes > 0
    for number in range(world):
        (alone_loss if number == rank else loss_of(single, number, 1.0)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        expected = single.get_parameter(name).grad
        assert expected is not None
        if name.endswith(("gate_up_EGD", "down_EDF")):
            expected = expected.chunk(world)[rank]
        else:
            dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)

    # The shared expert computed while rows travel, or after they are back: the same bits.
    found = []
    for ops in (model.ops, Sequential(model.ops)):
        assert hasattr(ops, "begin_experts") == (ops is model.ops)
        model.ops = ops  # type: ignore[assignment]
        model.zero_grad()
        loss = loss_of(model, rank, 1.0)
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_the_products_model(tmp_path: Path) -> None:
    on_ranks(2, own_model, tmp_path)


class Noted(torch.autograd.Function):
    """Work of this rank alone, and when it was done."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, events: list[str]) -> Tensor:
        ctx.events = events
        events.append("shared")
        return 2 * x_TD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.events.append("shared")
        return 2 * grads[0], None


def overlap(rank: int, world: int) -> None:
    """Rows, and in the backward pass their gradients, are on their way while the shared expert computes; with two
    chunks also while the other chunk computes."""
    events: list[str] = []

    def noted(name: str) -> Any:
        plain = getattr(RowsUnderWay, name)

        def call(way: RowsUnderWay, *given: Any) -> Any:
            events.append(name)
            return plain(way, *given)

        return call

    def compute(rows: Dispatched, first: int, last: int) -> Tensor:
        return Noted.apply(rows.x_AD, events) * rows.weights_A1

    with pytest.MonkeyPatch.context() as patch:
        for name in ("begin", "end"):
            patch.setattr(RowsUnderWay, name, noted(name))
        x_TD, routes = work(rank, "as they come")
        x_TD.requires_grad_()
        for chunks in (1, 2):
            finish = begin_experts(x_TD, routes, EXPERTS, Exchange(), compute, chunks)
            shared_TD = Noted.apply(x_TD, events)
            y_TD = finish() + shared_TD
            begun = ["begin", "begin"] * chunks  # rows and weights
            each = ["end", "end", "shared", "begin"] * chunks
            assert events == [*begun, "shared", *each, *["end"] * chunks]
            events.clear()
            y_TD.sum().backward()
            # Gradients of results set out, all at once; each chunk's are waited for, go through its experts and leave
            # (weights have none here); then the shared expert, and only then what has travelled is waited for.
            assert events == [*["begin"] * chunks, *["end", "shared", "begin"] * chunks, "shared", *["end"] * chunks]
            events.clear()


def test_what_travels_while_a_rank_computes(tmp_path: Path) -> None:
    on_ranks(1, overlap, tmp_path)


def test_orders() -> None:
    assert _bounds(8, 3) == [(0, 2), (2, 5), (5, 8)] and _bounds(2, 5) == [(0, 1), (1, 2)]
    assert _segments(torch.tensor([4, 0]), torch.tensor([2, 3])).tolist() == [4, 5, 0, 1, 2]
    # From rank 0: one row for expert 0, two for expert 1; from rank 1: two and one.
    assert _by_expert(torch.tensor([[1, 2], [2, 1]])).tolist() == [0, 3, 4, 1, 2, 5]


def wrong(rank: int, world: int) -> None:
    with pytest.raises(UserError, match="no experts"):
        ExpertParallel([])
    with pytest.raises(UserError, match="1 ranks are not whole nodes of 2"):
        ExpertParallel([expert(0)], dispatch="node", node_ranks=2)
    layer = ExpertParallel([expert(0)])
    with pytest.raises(UserError, match="outside 0 to 0"):
        layer(torch.zeros(1, HIDDEN), torch.tensor([[1]]), torch.ones(1, 1))
    with pytest.raises(UserError, match="do not agree"):
        layer(torch.zeros(2, HIDDEN), torch.tensor([[0]]), torch.ones(1, 1))


def test_wrong_calls(tmp_path: Path) -> None:
    on_ranks(1, wrong, tmp_path)


def as_documented(rank: int, world: int) -> None:
    text = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    lines = [
        line for line in code.splitlines() if not line.startswith("dist.init_process_group")
    ]  # there is one already
    found: dict[str, Any] = {}
    exec("\n".join(lines), found)
    assert found["y"].shape == (100, 64) and found["y"].isfinite().all()
    assert found["layer"].exchange.sent_bytes > 0


def test_the_documented_example(tmp_path: Path) -> None:
    on_ranks(2, as_documented, tmp_path)
