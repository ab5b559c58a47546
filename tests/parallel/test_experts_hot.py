"""Experts that most tokens want: copied to all ranks beside one process, and placed by their load."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels import reference
from moesaic.kernels.interface import Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.layout import Layout
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from moesaic.parallel.experts.placement import imbalance, place_experts
from moesaic.parallel.experts.shadows import bytes_of_tokens, bytes_of_weights, hot_experts
from tests.parallel.ranks import on_ranks
from tests.parallel.test_experts_nodes import EXPERTS, HIDDEN, PER_TOKEN, all_weights, apart
from tests.parallel.test_seams import batch, model_of

TOKENS = 240
WIDTH = 100  # at which it pays above 300 tokens
HOT = [3, 6]


def skewed(rank: int, step: int) -> tuple[Tensor, Routes]:
    """Experts 3 and 6 are chosen by nearly all tokens."""
    generator = torch.Generator().manual_seed(50 + 7 * step + rank)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
    scores_TE = torch.rand(TOKENS, EXPERTS, generator=generator)
    scores_TE[:, HOT] += 0.8
    return x_TD, Routes(scores_TE.topk(PER_TOKEN).indices, torch.rand(TOKENS, PER_TOKEN, generator=generator))


def shadowed(rank: int, world: int) -> None:
    """Three forwards and backwards: the first knows no loads, the others have the hot experts of the one before."""
    for shadow, expected_hot in ((2, HOT), (3, None), ("auto", HOT)):
        exchange, plain_exchange = Exchange(), Exchange()
        ops = ExpertParallelKernels(reference, exchange, shadow=shadow, chunks=2)  # type: ignore[arg-type]
        plain = ExpertParallelKernels(reference, plain_exchange)  # type: ignore[arg-type]
        assert ops.shadows is not None
        for step in range(3):
            given = [skewed(number, step) for number in range(world)]
            bound = ops.for_batch(Layout([TOKENS]))
            own = [nn.Parameter(part.chunk(world)[rank].clone()) for part in all_weights(WIDTH)]
            here = ExpertWeights(own[0], own[1], "silu", "layers.0")
            hot = [] if step == 0 else ops.shadows.hot(bound.loads["layers.0"], here)
            assert step == 0 or expected_hot is None or hot == expected_hot
            before = exchange.sent_bytes, plain_exchange.sent_bytes, ops.shadows.sent_bytes
            x_TD = given[rank][0].clone().requires_grad_()
            y_TD = bound.experts(x_TD, given[rank][1], here)
            with torch.no_grad():
                plain.experts(x_TD, given[rank][1], here)
            rows = exchange.sent_bytes - before[0]
            saved = plain_exchange.sent_bytes - before[1] - rows
            (y_TD * torch.arange(1, HIDDEN + 1)).sum().backward()

            whole = [nn.Parameter(part) for part in all_weights(WIDTH)]
            inputs = [x.clone().requires_grad_() for x, _ in given]
            all_routes = Routes(*(torch.cat(parts) for parts in zip(*(routes for _, routes in given), strict=True)))
            expected_TD = reference.experts(torch.cat(inputs), all_routes, ExpertWeights(whole[0], whole[1], "silu"))
            (expected_TD * torch.arange(1, HIDDEN + 1)).sum().backward()
            assert torch.equal(y_TD.detach(), expected_TD.detach().chunk(world)[rank])  # added up in the same order
            mine = inputs[rank].grad
            assert x_TD.grad is not None and mine is not None and apart(x_TD.grad, mine) < 1e-5
            for part, all_experts in zip(own, whole, strict=True):
                assert part.grad is not None and all_experts.grad is not None
                assert apart(part.grad, all_experts.grad.chunk(world)[rank]) < 1e-5

            # What stays at home: this rank's assignments to hot experts of others, and others' answers to them.
            row, each = 4 * HIDDEN, EXPERTS // world
            owners = torch.arange(EXPERTS) // each
            is_hot_E = torch.zeros(EXPERTS, dtype=torch.bool).index_fill(0, torch.tensor(hot, dtype=torch.int64), True)
            asked, answered = 0, 0
            for number, (_, routes) in enumerate(given):
                experts_A = routes.experts_TK.reshape(-1)
                hot_A = experts_A[is_hot_E[experts_A]]
                asked += int((owners[hot_A] != rank).sum()) if number == rank else 0
                answered += int((owners[hot_A] == rank).sum()) if number != rank else 0
            assert saved == asked * (row + 4) + answered * row and (step == 0) == (saved == 0)
            sent = sum(expert // each == rank for expert in hot) * (world - 1) * 3 * HIDDEN * WIDTH * 4
            assert ops.shadows.sent_bytes - before[2] == sent


def in_a_model(rank: int, world: int) -> None:
    """The product's model, its layers recomputed in the backward pass after the next forward has other loads."""
    single = model_of(experts=8, shared=1)
    model = copy.deepcopy(single)
    for block in model.layers:
        assert isinstance(block.ffn, MixtureFeedForward)
        for name in ("gate_up_EGD", "down_EDF"):
            setattr(block.ffn, name, nn.Parameter(getattr(block.ffn, name).detach().chunk(world)[rank].clone()))
    ops = ExpertParallelKernels(model.ops, Exchange(), shadow=2)
    model.ops = ops  # type: ignore[assignment]
    losses = []
    for step in range(2):
        for one in (single, model):
            tokens_T, targets_T, layout = batch(rank + 10 * step)
            x_TD, context = one.begin(tokens_T, layout)
            for block in one.layers:
                x_TD = torch.utils.checkpoint.checkpoint(block, x_TD, context, use_reentrant=False)
            losses.append(one.cross_entropy(one.norm(x_TD, context.ops), targets_T, torch.full((24,), 1 / 48))[0])
    assert ops.shadows is not None and ops.shadows.sent_bytes > 0
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[2], losses[3])
    for loss in losses:  # the first forwards' last: both are under way at once
        loss.backward()
    for number in range(world):
        if number != rank:
            for step in range(2):
                tokens_T, targets_T, layout = batch(number + 10 * step)
                single.cross_entropy(single(tokens_T, layout), targets_T, torch.full((24,), 1 / 48))[0].backward()
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_EGD", "down_EDF")):
            expected = single.get_parameter(name).grad
            assert parameter.grad is not None and expected is not None
            assert apart(parameter.grad, expected.chunk(world)[rank]) < 1e-5, name


def both(rank: int, world: int) -> None:
    shadowed(rank, world)
    in_a_model(rank, world)


def test_hot_experts_on_all_ranks(tmp_path: Path) -> None:
    on_ranks(2, both, tmp_path)


def test_which_are_worth_it() -> None:
    assert hot_experts([5, 0, 9, 5], 2) == [0, 2] and hot_experts([5, 0, 9, 5], 4) == [0, 2, 3]
    assert hot_experts([5, 0, 9, 5], 4, lambda count: count > 5) == [2]
    # Mixtral in bf16 on 8 ranks: an expert is 352 MB, a token 32 KB on all its ways; it pays above 258,048 tokens.
    price = bytes_of_weights(3 * 4096 * 14336, 2, 8)
    assert bytes_of_tokens(258_048, 8, 2 * 4096) == price


def test_placement() -> None:
    loads = [90, 10, 10, 10, 80, 70, 20, 10]
    order = place_experts(loads, 4)
    assert sorted(order) == list(range(8))
    assert imbalance(loads, 4) == pytest.approx(150 / 75) and imbalance(loads, 4, order) == pytest.approx(100 / 75)
    assert place_experts([1.0] * 6, 3) == place_experts([1.0] * 6, 3)
    assert imbalance([0, 0], 2) == 1.0
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):  # never worse than as numbered, for loads as skewed as Zipf's
        zipf = (1 / torch.arange(1, 65))[torch.randperm(64, generator=generator)].tolist()
        assert imbalance(zipf, 8, place_experts(zipf, 8)) <= imbalance(zipf, 8)
    with pytest.raises(UserError, match="do not divide 7 experts"):
        place_experts([1.0] * 7, 2)


def test_a_model_with_its_experts_in_another_order_is_the_same_model() -> None:
    model = model_of(experts=8)
    tokens_T, _, layout = batch(0)
    with torch.no_grad():
        expected_TD = model(tokens_T, layout)
        for block in model.layers:
            assert isinstance(block.ffn, MixtureFeedForward)
            order = torch.tensor(place_experts([float(number % 5) for number in range(8)], 4))
            router = block.ffn.router
            for tensor in (block.ffn.gate_up_EGD, block.ffn.down_EDF, router.weight, router.correction):
                if tensor is not None:
                    tensor.copy_(tensor[order].clone())
        torch.testing.assert_close(model(tokens_T, layout), expected_TD, rtol=1e-5, atol=1e-6)
