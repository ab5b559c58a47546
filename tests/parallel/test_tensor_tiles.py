"""Collectives and matmuls in tiles: any number of them gives what one process gives, in the order that overlaps, with
the bytes that the formulas say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.model.config import Latent, ModelConfig
from moesaic.model.transformer import Model
from moesaic.parallel.rows import Traffic
from moesaic.parallel.tensor.exchange import Chunks, Gathering, Scattering, TileExchange
from moesaic.parallel.tensor.kernels import TensorParallelKernels
from moesaic.parallel.tensor.matmul import (
    Copies,
    Division,
    Gather,
    GatherMatmul,
    MatmulScatter,
    gather_then,
    then_scatter,
)
from moesaic.train.layer_runners.recompute import recompute
from tests.parallel.ranks import on_ranks
from tests.parallel.test_tensor import (
    DEEPSEEK,
    GLM,
    LENGTHS,
    batch_of,
    compare,
    divided,
    model_of,
    rows_of,
    run,
)


def whole_numbers(seed: int, *shape: int) -> Tensor:
    """Their sums are exact in any order, so that a wrong row shows in the bits."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def same_matmuls(exchange: TileExchange, total: int, tiles: int, keep: bool) -> None:
    rank, ranks = exchange.rank, exchange.size
    division = Division(exchange, Chunks(total, ranks), tiles, keep)
    mine = division.chunks.of(rank)
    inputs, outputs = 5, 3 * ranks
    own = slice(3 * rank, 3 * rank + 3)

    # Gather, then multiply: against one process with the whole weight.
    x_TD = whole_numbers(1, total, inputs).requires_grad_()
    weight_OD, bias_O = whole_numbers(2, outputs, inputs).requires_grad_(), whole_numbers(3, outputs).requires_grad_()
    slopes_TO = whole_numbers(4, total, outputs)
    y_TO = F.linear(x_TD, weight_OD, bias_O)
    y_TO.backward(slopes_TO)
    leaves = [x_TD[mine], weight_OD[own], bias_O[own]]
    x_ND, part_OD, part_O = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    gathered_TD = None if total % 2 else x_TD.detach()  # as if another had gathered them
    found_TO: Any = GatherMatmul.apply(x_ND, part_OD, part_O, F.linear, division, None, gathered_TD)
    found_TO.backward(slopes_TO[:, own])
    assert torch.equal(found_TO, y_TO[:, own])
    for found, expected in ((x_ND, grad(x_TD)[mine]), (part_OD, grad(weight_OD)[own]), (part_O, grad(bias_O)[own])):
        assert torch.equal(grad(found), expected)

    # Multiply, then scatter.
    h_TO, back_DO = (
        whole_numbers(5, total, outputs).requires_grad_(),
        whole_numbers(6, inputs, outputs).requires_grad_(),
    )
    slopes_TD = whole_numbers(7, total, inputs)
    z_TD = F.linear(h_TO, back_DO)
    z_TD.backward(slopes_TD)
    part_TO, part_DO = (whole.detach()[:, own].clone().requires_grad_() for whole in (h_TO, back_DO))
    found_ND: Any = MatmulScatter.apply(part_TO, part_DO, F.linear, division)
    found_ND.backward(slopes_TD[mine])
    assert torch.equal(found_ND, z_TD[mine])
    assert torch.equal(grad(part_TO), grad(h_TO)[:, own]) and torch.equal(grad(part_DO), grad(back_DO)[:, own])

    # Gathered rows that every rank uses its own way: their gradients add up.
    x_ND = x_TD.detach()[mine].clone().requires_grad_()
    found_TD: Any = Gather.apply(x_ND, division, True)
    found_TD.backward(slopes_TD * (rank + 1))
    assert torch.equal(found_TD, x_TD) and torch.equal(grad(x_ND), slopes_TD[mine] * sum(range(1, ranks + 1)))


def half_precision(rank: int, world: int) -> None:
    """Everything in bfloat16 but sums over ranks; float16 where a rank has no row."""
    for dtype, lengths in ((torch.bfloat16, LENGTHS), (torch.float16, [3])):
        whole = model_of(GLM).to(dtype)
        expected = run(whole, batch_of(lengths))
        model, _ = divided(whole, rank, world, experts=False, tiles=2)
        found = run(model, batch_of(lengths))
        dist.all_reduce(found.loss)
        torch.testing.assert_close(found.loss, expected.loss, rtol=0.01, atol=0)
        assert all(gradient.dtype == dtype and gradient.isfinite().all() for gradient in found.gradients.values())


def same_copies(exchange: TileExchange, held: int) -> None:
    """Rows of a weight that `held` ranks have alike: each gets the sum of their gradients, and only of theirs."""
    rank, ranks = exchange.rank, exchange.size
    chunks = Chunks(6, ranks)
    x_ND = whole_numbers(1, 6, 5)[chunks.of(rank)].requires_grad_()
    weight_OD, bias_O = whole_numbers(20, 4, 5).requires_grad_(), whole_numbers(21, 4).requires_grad_()
    y_TO: Any = GatherMatmul.apply(
        x_ND, weight_OD, bias_O, F.linear, Division(exchange, chunks, 2, True), Copies(1, held), None
    )
    slopes = [whole_numbers(30 + other, 6, 4) for other in range(ranks)]
    y_TO.backward(slopes[rank])
    holders = range(rank // held * held, rank // held * held + held)
    gradients = [slope.T @ whole_numbers(1, 6, 5) for slope in slopes]
    assert torch.equal(grad(weight_OD)[:1], gradients[rank][:1])
    assert torch.equal(grad(weight_OD)[1:], torch.stack([gradients[other][1:] for other in holders]).sum(0))
    assert torch.equal(grad(bias_O)[1:], torch.stack([slopes[other].sum(0)[1:] for other in holders]).sum(0))
    assert torch.equal(grad(bias_O)[:1], slopes[rank].sum(0)[:1])


class Watched(TileExchange):
    """Notes when tiles begin and are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def begin_gathers(self, own_ND: Tensor, chunks: Chunks, tiles: int, *, backward: bool = False) -> list[Gathering]:
        begun = super().begin_gathers(own_ND, chunks, tiles, backward=backward)
        return [self._noted(tile, number) for number, tile in enumerate(begun)]

    def begin_scatter_others(self, parts_AD: Tensor, sizes: list[int], *, backward: bool = False) -> Scattering:
        number = sum(event.startswith("begin") for event in self.events)
        tile: Scattering = self._noted(super().begin_scatter_others(parts_AD, sizes, backward=backward), number)
        return tile

    def _noted(self, tile: Gathering | Scattering, number: int) -> Any:
        self.events.append(f"begin {number}")
        wait = tile.wait
        tile.wait = lambda: self.events.append(f"wait {number}") or wait()  # type: ignore[method-assign, func-returns-value]
        return tile


def order(rank: int, world: int) -> None:
    """A tile travels while another is multiplied: every one begins before it is needed, and waits come last."""
    exchange = Watched()
    division = Division(exchange, Chunks(6 * world, world), 3, True)

    def product(rows_AD: Tensor) -> Tensor:
        exchange.events.append(f"multiply {len(rows_AD)}")
        return rows_AD * 2

    x_TD = whole_numbers(9, 6 * world, 2)
    y_TD, kept_TD = gather_then(x_TD[division.chunks.of(rank)], product, division, keep=True)
    assert torch.equal(y_TD, 2 * x_TD) and kept_TD is not None and torch.equal(kept_TD, x_TD)
    tile = f"multiply {2 * (world - 1)}"
    begun = ["begin 0", "begin 1", "begin 2", "multiply 6"]
    assert exchange.events == [*begun, "wait 0", tile, "wait 1", tile, "wait 2", tile]

    exchange.events.clear()
    y_ND = then_scatter(x_TD, product, division, lambda: exchange.events.append("meanwhile"))
    assert torch.equal(y_ND, 2 * world * x_TD[division.chunks.of(rank)])
    begun = [tile, "begin 0", tile, "begin 1", tile, "begin 2", "multiply 6", "meanwhile"]
    assert exchange.events == [*begun, "wait 0", "wait 1", "wait 2"]


def expected_traffic(config: ModelConfig, total: int, ranks: int, tiles: int, keep: bool) -> Traffic:
    """What leaves the last rank. Each half of a layer gathers its input's rows and scatters its output's, and on the
    way back the other way round; a gathered row goes to all other ranks, a scattered one to its owner."""
    chunks = Chunks(total, ranks)
    gathered = sum(max(chunks.sizes(number, tiles)) for number in range(tiles)) * (ranks - 1)
    at_once = max(chunks.sizes()) * (ranks - 1)
    scattered = total - chunks.sizes()[-1]
    forward = backward = 0
    attention, hidden = config.attention, config.hidden
    for _ in config.layers:
        read = hidden
        if isinstance(attention, Latent):
            latent = attention.kv_rank + attention.rope_size
            read = attention.q_rank or hidden
            forward += at_once * latent
            backward += scattered * latent
        else:
            copies = max(1, ranks // attention.kv_heads)
            rows = 2 * max(1, attention.kv_heads // ranks) * attention.head_size
            backward += (copies - 1) * rows * (hidden + attention.qkv_bias)
        forward += gathered * (read + hidden) + scattered * 2 * hidden
        backward += gathered * 2 * hidden + scattered * (read + hidden)
        backward += 0 if keep else at_once * (read + hidden)
    return Traffic(4 * forward, 4 * backward)


def same_traffic(rank: int, world: int, config: ModelConfig, lengths: list[int], tiles: int, keep: bool) -> None:
    model, _ = divided(model_of(config), rank, world, experts=False, tiles=tiles, keep=keep)
    run(model, batch_of(lengths))
    if rank == world - 1:
        assert model.ops.traffic == expected_traffic(config, sum(lengths), world, tiles, keep)  # type: ignore[attr-defined]


def every_schedule(rank: int, world: int) -> None:
    exchange = TileExchange()
    for total in (0, 1, 3, 8, 13):
        for tiles in (1, 2, 5):
            for keep in (True, False):
                try:
                    same_matmuls(exchange, total, tiles, keep)
                except AssertionError as error:
                    raise AssertionError(f"{total} rows, {tiles} tiles, kept: {keep}, rank {rank}") from error
    for held in {1, 2, world}:
        same_copies(exchange, held)
    order(rank, world)
    half_precision(rank, world)

    for config in (replace(GLM, mtp=()), replace(DEEPSEEK, mtp=())):
        for lengths, tiles, keep in (([16, 8], 1, True), ([16, 8], 3, False), (LENGTHS, 2, True)):
            same_traffic(rank, world, config, lengths, tiles, keep)

    batch = batch_of(LENGTHS)
    for config in (GLM, DEEPSEEK):
        whole = model_of(config)
        expected = run(whole, batch)
        plain = run(divided(whole, rank, world, experts=False)[0], batch)
        largest = max(float(one.abs().max()) for one in plain.hidden if len(one))
        for options, runner in (({"tiles": 3}, None), ({"tiles": 2, "keep": False}, recompute)):
            model, parts = divided(whole, rank, world, experts=False, **options)
            found = run(model, batch) if runner is None else run(model, batch, runner)
            for one, other in zip(found.hidden, plain.hidden, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * largest)
            compare(found, expected, parts, rows_of(sum(LENGTHS), rank, world))

    if native.kernels() is not None:  # a row has the same bits in any batch, so tiles change nothing
        whole = Model(GLM, mode="invariant")
        whole.load_state_dict(model_of(GLM).state_dict())
        outcomes = [run(divided(whole, rank, world, experts=False, tiles=tiles)[0], batch) for tiles in (1, 2, 5)]
        for outcome in outcomes[1:]:
            assert all(map(torch.equal, outcome.hidden, outcomes[0].hidden))
            assert torch.equal(outcome.loss, outcomes[0].loss)

    with pytest.raises(UserError, match="from 1 on"):
        TensorParallelKernels(model_of(GLM).ops, None, GLM, tiles=0)


@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule(world: int, tmp_path: Path) -> None:
    on_ranks(world, every_schedule, tmp_path)


def test_chunks_and_tiles_cover_all_rows() -> None:
    for total in range(40):
        for ranks in (1, 2, 4, 8):
            chunks = Chunks(total, ranks)
            rows = [row for rank in range(ranks) for row in range(total)[chunks.of(rank)]]
            assert rows == list(range(total))
            for tiles in (1, 2, 3, 7):
                for rank in range(ranks):
                    cut = [row for number in range(tiles) for row in range(total)[chunks.tile(rank, number, tiles)]]
                    assert cut == list(range(total))[chunks.of(rank)]
                for number in range(tiles):  # so that at most one row is sent for nothing
                    assert max(chunks.sizes(number, tiles)) - min(chunks.sizes(number, tiles)) <= 1
