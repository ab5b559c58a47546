"""Sequences divided among ranks beside one process: hidden states, losses and gradients, on two and four processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.data.packing import Batch
from moesaic.kernels.interface import AttentionCall
from moesaic.model.config import Latent, ModelConfig
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.context.heads import divide_heads
from moesaic.parallel.context.kernels import ContextParallelKernels
from moesaic.parallel.rows import RowGroup, RowSplit, SplitKind, gather_rows
from moesaic.recipe import load_recipe
from moesaic.train.architecture import architecture
from moesaic.train.balance import sequence_loss
from moesaic.train.objectives import shifted
from moesaic.train.objectives.next_token import NextToken
from tests.parallel.ranks import in_turn, on_ranks

VOCAB = 61
SIZES = "vocab: 61, hidden: 24, layers: 2, dense_hidden: 40, experts: 6, experts_per_token: 2,"
SIZES += " expert_hidden: 20, context: 64"
SHAPES = {
    "glm4_moe": "heads: 6, kv_heads: 2, head_size: 8, mtp_layers: 2, shared_experts: 1, dense_layers: 1",
    "qwen3_moe": "heads: 4, kv_heads: 1, head_size: 8, shared_experts: 0, dense_layers: 0,"
    " router: {score: softmax, correction: false}",
    "deepseek_v3": "heads: 3, mtp_layers: 1, dense_layers: 1, router: {groups: 2, top_groups: 1},"
    " latent: {kv_rank: 10, q_rank: 12, plain_size: 8, rope_size: 4, value_size: 6}",
    "glm_moe_dsa": "heads: 3, mtp_layers: 1, dense_layers: 1, indexer: {heads: 2, head_size: 8, topk: 64, share: 2},"
    " latent: {kv_rank: 10, q_rank: 12, plain_size: 8, rope_size: 4, value_size: 6}",
}
TOPK = 5  # of a sparse model's tokens; none is trained from scratch to choose so few
# Ragged, with sequences of one token; fewer rows than ranks.
BATCHES = ([9, 1, 14, 5], [1, 2], [23])


@cache
def config_of(family: str) -> ModelConfig:
    given = f"model={{family: {family}, {SIZES}, {SHAPES[family]}}}"
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/tiny.yaml", [given])
    config = architecture(recipe.model, bos=None, eos=(), pad=None)
    if isinstance(config.attention, Latent) and config.attention.indexer is not None:
        chosen = replace(config.attention.indexer, topk=TOPK)
        config = replace(config, attention=replace(config.attention, indexer=chosen))
    return config


def model_of(family: str) -> Model:
    return Model(config_of(family)).initialize(3)


def batch_of(lengths: list[int]) -> Batch:
    tokens_T = torch.randint(0, VOCAB, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    return Batch(tokens_T, shifted(tokens_T, lengths, 1, -100), lengths, [0] * len(lengths), sum(lengths))


def close(found: Tensor, expected: Tensor, what: str) -> None:
    """1e-5 relative to the largest number of the tensor: an element may be a difference of large ones."""
    bound = 1e-5 * max(float(expected.abs().max()) if expected.numel() else 0.0, 1e-3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=bound, msg=lambda text: f"{what}: {text}")


def compare(family: str, lengths: list[int], make: Callable[[Model], ContextParallelKernels], what: str) -> None:
    single, model = model_of(family), model_of(family)
    ops = make(model)
    model.ops = ops  # type: ignore[assignment]
    batch, layout = batch_of(lengths), Layout(lengths)
    objective = NextToken()
    alone, spread = (objective(one, batch, Routing()) for one in (single, model))
    total = spread.total.detach().clone()
    dist.all_reduce(total)
    close(total, alone.total.detach(), f"{what}: loss")
    hidden_TD = ops.gather(model(batch.tokens_T, layout).detach(), layout)
    close(hidden_TD, single(batch.tokens_T, layout).detach(), f"{what}: hidden states")
    alone.total.backward()
    spread.total.backward()
    expected, found = (
        [torch.zeros_like(part) if part.grad is None else part.grad for part in one.parameters()]
        for one in (single, model)
    )
    summed = torch.cat([part.reshape(-1) for part in found])
    dist.all_reduce(summed)
    parts = summed.split([part.numel() for part in found])
    for (name, _), part, other in zip(model.named_parameters(), parts, expected):
        close(part.view(other.shape), other, f"{what}: {name}")


def every_model(rank: int, world: int) -> None:
    ways: list[tuple[list[int], SplitKind]] = [(lengths, "contiguous") for lengths in BATCHES]
    for family in SHAPES:
        for lengths, split in [*ways, (BATCHES[0], "zigzag")]:

            def make(model: Model, split: SplitKind = split) -> ContextParallelKernels:
                return ContextParallelKernels(model.ops, split=split)

            compare(family, lengths, make, f"{family} {lengths} {split} rank {rank}")


def attention_alone(rank: int, world: int) -> None:
    """Attention by Ulysses has the bits of one process, for heads that ranks cannot divide; bytes are as counted."""
    plain = model_of("glm4_moe").ops
    for heads, kv_heads, window in ((6, 2, None), (7, 7, None), (4, 1, 5), (3, 3, None), (12, 3, 4)):
        for lengths in BATCHES if heads == 6 else BATCHES[:1]:
            for split in ("contiguous", "zigzag"):
                ops = ContextParallelKernels(plain, split=split)  # type: ignore[arg-type]
                generator = torch.Generator().manual_seed(heads)
                tokens, layout = sum(lengths), Layout(lengths)
                sizes = ((heads, 8), (kv_heads, 8), (kv_heads, 8))
                whole = [torch.randn(tokens, *size, generator=generator).requires_grad_() for size in sizes]
                call = AttentionCall(layout, None, 0.3, window)
                out_THC = plain.attend(*whole, call)
                weight_THC = torch.randn(out_THC.shape, generator=generator)
                (out_THC * weight_THC).sum().backward()

                rows_T = ops.split(layout).parts[rank]
                mine = [part.detach()[rows_T].requires_grad_() for part in whole]
                found_THC = ops.attend(*mine, call)
                assert torch.equal(found_THC.detach(), out_THC.detach()[rows_T]), (heads, kv_heads, window, lengths)
                (found_THC * weight_THC[rows_T]).sum().backward()
                for part, other in zip(mine, whole):
                    assert part.grad is not None and other.grad is not None
                    close(part.grad, other.grad[rows_T], f"{heads} {kv_heads} {lengths} {split}")

                shares = divide_heads(heads, kv_heads, world)
                away = [share.heads + 2 * len(share.kv) for other, share in enumerate(shares) if other != rank]
                back = (tokens - len(rows_T)) * shares[rank].heads
                size = 4 * 8
                assert ops.traffic.forward == size * (len(rows_T) * sum(away) + back)
                own = shares[rank].heads + 2 * len(shares[rank].kv)
                others = heads - shares[rank].heads
                assert ops.traffic.backward == size * ((tokens - len(rows_T)) * own + len(rows_T) * others)


def balance_losses(rank: int, world: int) -> None:
    """A loss that needs whole sequences: every rank computes it whole, and its gradient counts once."""
    lengths = [9, 1, 14, 5]
    shape = model_of("glm4_moe").layers[1].ffn.router.shape
    logits_TE = torch.randn(29, shape.count, generator=torch.Generator().manual_seed(5)).requires_grad_()
    routes_TK = logits_TE.detach().topk(shape.per_token).indices
    expected = sequence_loss(logits_TE, routes_TK, lengths, shape)
    expected.backward()
    ops = ContextParallelKernels(model_of("glm4_moe").ops, split="zigzag")
    layout = Layout(lengths)
    rows_T = ops.split(layout).parts[rank]
    mine_TE = logits_TE.detach()[rows_T].requires_grad_()
    found = sequence_loss(ops.gather(mine_TE, layout), ops.gather(routes_TK[rows_T], layout), lengths, shape)
    assert torch.equal(found.detach(), expected.detach())
    found.backward()
    assert mine_TE.grad is not None and logits_TE.grad is not None
    assert torch.equal(mine_TE.grad, logits_TE.grad[rows_T])
    assert ops.traffic.backward == 0


def gradients_add_up(rank: int, world: int) -> None:
    """Where every rank uses all rows for a part of the loss, gradients are the sum of what ranks found."""
    split, ranks = RowSplit.of([5, 1, 3], world, "zigzag"), RowGroup()
    whole_TD = torch.arange(18.0).view(9, 2)
    mine_TD = whole_TD[split.parts[rank]].requires_grad_()
    found_TD = gather_rows(mine_TD, split, ranks)
    assert torch.equal(found_TD.detach(), whole_TD)
    (found_TD * whole_TD * (rank + 1)).sum().backward()
    expected_TD = whole_TD * (world * (world + 1) // 2)
    assert mine_TD.grad is not None and torch.equal(mine_TD.grad, expected_TD[split.parts[rank]])
    assert ranks.traffic.forward == (world - 1) * max(split.counts) * 8
    assert ranks.traffic.backward == (9 - len(mine_TD)) * 8


@pytest.mark.parametrize("world", [2, 4])
def test_beside_one_process(world: int, tmp_path: Path) -> None:
    on_ranks(world, in_turn, tmp_path, every_model, attention_alone, balance_losses, gradients_add_up)


@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
def test_every_row_has_one_rank(kind: SplitKind) -> None:
    for lengths in ([9, 1, 14, 5], [1], [0, 3, 0], [64], []):
        for ranks in (1, 2, 3, 4, 7):
            split = RowSplit.of(lengths, ranks, kind)
            assert split.order_T.sort().values.tolist() == list(range(sum(lengths)))
            assert all(part.tolist() == sorted(part.tolist()) for part in split.parts)
            starts = [sum(lengths[:number]) for number in range(len(lengths))]
            for part, runs in zip(split.parts, split.runs):
                places = [starts[run.sequence] + run.position + at for run in runs for at in range(run.length)]
                assert places == part.tolist()
                assert [run.row for run in runs] == [sum(run.length for run in runs[:at]) for at in range(len(runs))]
            assert max(split.counts) - min(split.counts) <= 1 + (kind == "zigzag")
            rows_T = torch.arange(sum(lengths))
            assert torch.equal(split.ordered(split.by_rank(rows_T)), rows_T)


def test_zigzag_balances_causal_pairs() -> None:
    lengths = [1024, 512, 2048]
    pairs_T = torch.cat([torch.arange(1, length + 1) for length in lengths])
    for ranks in (2, 4, 8):
        even = [int(pairs_T[part].sum()) for part in RowSplit.of(lengths, ranks, "zigzag").parts]
        assert max(even) == min(even)
        uneven = [int(pairs_T[part].sum()) for part in RowSplit.of(lengths, ranks).parts]
        assert max(uneven) > 1.2 * min(uneven)


def test_heads_are_divided_evenly() -> None:
    shares = divide_heads(6, 2, 4)
    assert [share.heads for share in shares] == [2, 2, 1, 1]
    assert [share.kv for share in shares] == [(0,), (0, 1), (1,), (1,)]
    assert divide_heads(12, 3, 2)[0].kv_of == (0, 0, 0, 0, 1, 1) and divide_heads(8, 4, 2)[0].kv_of is None
    assert [share.heads for share in divide_heads(3, 1, 4)] == [1, 1, 1, 0]
