"""Mesh-Attention beside one process and beside Ulysses: results, gradients and bytes, on two and four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels import reference
from moesaic.kernels.interface import AttentionCall
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.context.block_attention import Findings, PlainRunAttention, Rule
from moesaic.parallel.context.kernels import ContextParallelKernels
from moesaic.parallel.context.mesh_schedule import Costs, Transfer, greedy_schedule
from moesaic.parallel.context.mesh_tiles import (
    Place,
    RowBytes,
    Tile,
    best_tile,
    mesh_volume,
    ring_volume,
    ulysses_volume,
)
from moesaic.parallel.rows import SplitKind
from tests.parallel.ranks import in_turn, on_ranks
from tests.parallel.test_context import BATCHES, SHAPES, close, compare, model_of


def every_model(rank: int, world: int) -> None:
    for family in SHAPES:
        for lengths, tile in zip(BATCHES, ((2, world // 2), (world, 1), None)):

            def make(model: Model, tile: tuple[int, int] | None = tile) -> ContextParallelKernels:
                return ContextParallelKernels(model.ops, method="mesh", tile=tile)

            compare(family, lengths, make, f"{family} {lengths} tile {tile} rank {rank}")


def attended(ops: ContextParallelKernels, whole: list[Tensor], call: AttentionCall, rank: int) -> list[Tensor]:
    """This rank's outputs, and gradients of its queries, keys and values."""
    rows_T = ops.split(call.layout).parts[rank]
    mine = [part.detach()[rows_T].requires_grad_() for part in whole]
    out_THC = ops.attend(*mine, call)
    weight_THC = torch.arange(whole[0].numel()).view(whole[0].shape).sin()
    (out_THC * weight_THC[rows_T]).sum().backward()
    return [ops.gather(part, call.layout) for part in (out_THC.detach(), *(part.grad for part in mine))]


def every_shape(rank: int, world: int) -> None:
    plain = model_of("glm4_moe").ops
    shapes = [Tile(queries, world // queries) for queries in (1, 2, world) if world % queries == 0]
    for heads, kv_heads, window in ((6, 2, None), (4, 4, None), (4, 1, 5)):
        for lengths in BATCHES if heads == 6 else BATCHES[:1]:
            layout = Layout(lengths)
            call = AttentionCall(layout, None, 0.3, window)
            generator = torch.Generator().manual_seed(heads)
            sizes = [(sum(lengths), count, 8) for count in (heads, kv_heads, kv_heads)]
            whole = [torch.randn(size, generator=generator) for size in sizes]
            expected = attended(ContextParallelKernels(plain), whole, call, rank)
            splits: tuple[SplitKind, ...] = ("contiguous", "zigzag")
            for split in splits:
                for tile in shapes:
                    ops = ContextParallelKernels(plain, method="mesh", split=split, tile=tile)
                    for found, other in zip(attended(ops, whole, call, rank), expected):
                        close(found, other, f"{heads} {kv_heads} {window} {lengths} {split} {tile}")
    with pytest.raises(UserError, match=f"as many as ranks: {world}"):
        ContextParallelKernels(plain, method="mesh", tile=(3, 5))


def bytes_sent(rank: int, world: int) -> None:
    """As the formulas say, where every block is looked at; less where some are not."""
    rows, heads, size, lengths = 8, 4, 8, [8 * world]
    row = RowBytes(4 * heads * size, 2 * 4 * heads * size, 4 * heads * size, 4 * heads)
    call = AttentionCall(Layout(lengths), None, 0.3)
    whole = [torch.randn(lengths[0], heads, size, generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    plain, sent = model_of("glm4_moe").ops, {}
    for method, tile in (("ring", None), ("mesh", None), ("mesh", (world, 1)), ("ulysses", None)):
        ops = ContextParallelKernels(plain, method=method, tile=tile)  # type: ignore[arg-type]
        rows_T = ops.split(call.layout).parts[rank]
        mine = [part[rows_T].requires_grad_() for part in whole]
        ops.attend(*mine, call).sum().backward()
        if method == "ulysses":
            formula = ulysses_volume(world, row, rows)
        else:
            formula = mesh_volume(ops.tile or best_tile(world, row), row, rows)
        assert (ops.traffic.forward, ops.traffic.backward) == formula, (method, tile)
        sent[method, tile] = ops.traffic.forward + ops.traffic.backward
    if world == 4:
        assert best_tile(world, row) == Tile(2, 2)
        assert sent["mesh", None] < 0.65 * sent["ring", None]

    # Sequences that end where a rank's rows do: nothing is looked at elsewhere, and nothing travels.
    ops = ContextParallelKernels(plain, method="ring", split="contiguous")
    call = AttentionCall(Layout([8] * world), None, 0.3)
    mine = [part[rank * 8 : rank * 8 + 8].requires_grad_() for part in whole]
    ops.attend(*mine, call).sum().backward()
    assert ops.traffic.forward == ops.traffic.backward == 0
    # One sequence in equal runs: the first rank needs nobody's keys, and all others need the first's.
    ops = ContextParallelKernels(plain, method="ring", split="contiguous")
    ops.attend(*mine, AttentionCall(Layout([8 * world]), None, 0.3))
    assert ops.traffic.forward == (world - 1 - rank) * rows * row.keys_values


@pytest.mark.parametrize("world", [2, 4])
def test_beside_one_process(world: int, tmp_path: Path) -> None:
    on_ranks(world, in_turn, tmp_path, every_model, every_shape, bytes_sent)


def test_tiles_cover_every_pair_of_blocks_once() -> None:
    for ranks in (1, 2, 4, 6, 16):
        for queries in range(1, ranks + 1):
            if ranks % queries:
                continue
            tile = Tile(queries, ranks // queries)
            pairs = []
            for rank in range(ranks):
                place = Place(rank, tile)
                assert place.across(0) == place.down(0) == rank
                pairs += [(place.across(i), place.down(j)) for i in range(tile.queries) for j in range(tile.keys)]
            assert sorted(pairs) == [(i, j) for i in range(ranks) for j in range(ranks)]


def test_volumes_of_many_ranks() -> None:
    """The paper's claim for 256 devices: 79 % less on average and up to 85 % less than ring attention."""
    row = RowBytes(queries=64 * 128 * 2, keys_values=2 * 64 * 128 * 2, outputs=64 * 128 * 2, sums=64 * 4)
    saved = {}
    for ranks in (4, 16, 64, 256):
        tile = best_tile(ranks, row)
        saved[ranks] = 1 - mesh_volume(tile, row, 1).both / ring_volume(ranks, row, 1).both
        assert mesh_volume(tile, row, 1).both <= 11.5 * ranks**0.5 * row.queries  # grows with the root
        assert ring_volume(ranks, row, 1).both == 3 * (ranks - 1) * row.keys_values  # with the ranks
    assert best_tile(256, row) == Tile(16, 16)
    assert 0.35 < saved[4] < saved[16] < saved[64] < saved[256] and saved[256] > 0.854
    # Twelve query heads for one key head (GLM-4.5): queries are dear, keys cheap, and a ring is best for longer.
    grouped = row._replace(keys_values=row.keys_values // 12)
    assert best_tile(4, grouped) == Tile(1, 4) and best_tile(256, grouped).queries in (4, 8)
    assert ulysses_volume(256, row, 1).both < mesh_volume(Tile(16, 16), row, 1).both


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(1, 4), Tile(4, 1), Tile(2, 2), Tile(4, 4), Tile(2, 8)])
def test_schedule(tile: Tile, backward: bool) -> None:
    steps = greedy_schedule(tile, Costs(1, 2, 1, 2 if backward else 0))
    here = {Transfer("queries", 0), Transfer("keys", 0)}
    done: list[tuple[int, int]] = []
    for transfer, blocks in steps:
        if transfer is not None and transfer.kind == "query results":
            assert sum(query == transfer.number for query, _ in done) == tile.keys
        if transfer is not None and transfer.kind == "key results":
            assert sum(key == transfer.number for _, key in done) == tile.queries
        for query, key in blocks:
            assert {Transfer("queries", query), Transfer("keys", key)} <= here  # came in an earlier step
        done += blocks
        assert transfer is None or transfer not in here
        here |= {transfer} if transfer is not None else set()
    assert sorted(done) == [(query, key) for query in range(tile.queries) for key in range(tile.keys)]
    kinds = ["query results"] + ["key results"] * backward
    for kind, count in zip(["queries", "keys", *kinds], [tile.queries, tile.keys, tile.queries, tile.keys]):
        assert {number for found, number in here if found == kind} | {0} == set(range(count))
    # Something is computed while a block comes, every time.
    assert all(blocks for transfer, blocks in steps if transfer is not None and transfer.kind in ("queries", "keys"))
    assert len(steps) <= len(here) + 2


def test_schedule_brings_what_most_waits_for() -> None:
    cheap_keys = [step.transfer for step in greedy_schedule(Tile(2, 3), Costs(10, 1, 10))]
    assert cheap_keys[:3] == [Transfer("keys", 1), Transfer("keys", 2), Transfer("queries", 1)]
    cheap_queries = [step.transfer for step in greedy_schedule(Tile(3, 2), Costs(1, 10, 1))]
    assert cheap_queries[:3] == [Transfer("queries", 1), Transfer("queries", 2), Transfer("keys", 1)]


def test_runs_and_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence cut anywhere gives what the whole does, a few scores at a time, also where a query sees no key."""
    monkeypatch.setattr("moesaic.parallel.context.block_attention.SCORES", 40)
    generator = torch.Generator().manual_seed(1)
    q_THC, k_TNC, v_TNC = (torch.randn(11, heads, 4, generator=generator) for heads in (4, 2, 2))
    for window in (None, 3):
        found = Findings.none(q_THC, 4)
        for start, stop in ((0, 4), (4, 9), (9, 11)):
            for first, last in ((0, 2), (2, 9), (9, 11)):
                part = q_THC[start:stop], k_TNC[first:last], v_TNC[first:last]
                found.add(*PlainRunAttention().forward(*part, first - start, Rule(0.5, window)), slice(start, stop))
        expected = reference.attend(q_THC, k_TNC, v_TNC, AttentionCall(Layout([11]), None, 0.5, window))
        torch.testing.assert_close(found.out_THV, expected)
