"""Pipelines beside one process that accumulates: loss, its parts and every gradient, on two and four processes."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from moesaic.data.packing import IGNORED, Batch
from moesaic.model.config import Dense, Experts, GroupedQuery, Latent, Layer, ModelConfig, Rope
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.parallel.pipeline.schedule import Pipeline, PipelineLoss
from moesaic.parallel.pipeline.stages import Stages, divide, keep, stage_holds
from moesaic.recipe import BalanceSection
from moesaic.train.balance import Balance
from moesaic.train.layer_runners.recompute import recompute
from moesaic.train.objectives.next_token import NextToken
from tests.parallel.ranks import on_ranks

BALANCE = BalanceSection(sequence_loss=0.01, z_loss=0.001)
HEADS = GroupedQuery(heads=4, kv_heads=2, head_size=8, qk_norm=True)
LATENT = Latent(heads=3, kv_rank=10, plain_size=6, rope_size=4, value_size=5, q_rank=12)


def config(name: str, layers: int = 4) -> ModelConfig:
    sigmoid = Experts(6, 2, 20, score="sigmoid", correction=True, scale=1.5, shared_hidden=20)
    if name == "glm-4.5":
        ffns = (Layer(Dense(40)),) + (Layer(sigmoid),) * (layers - 1)
        return ModelConfig(name, 61, 24, HEADS, Rope(4), ffns, (Layer(sigmoid),))
    if name == "deepseek-v3":
        grouped = Experts(8, 2, 20, score="sigmoid", correction=True, groups=4, top_groups=2, shared_hidden=20)
        ffns = (Layer(Dense(40)),) + (Layer(grouped),) * (layers - 1)
        return ModelConfig(name, 61, 24, LATENT, Rope(4, interleaved=True), ffns, (Layer(grouped),))
    assert name.startswith("qwen3")
    return ModelConfig(name, 61, 24, HEADS, Rope(8), (Layer(Experts(6, 2, 20)),) * layers, tied="tied" in name)


def model_of(name: str, layers: int = 4) -> Model:
    model = Model(config(name, layers)).initialize(5)
    with torch.no_grad():  # larger than a fresh model's, or rounding would be all there is to a gradient
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 10
    return model


def batch_of(pieces: int = 11, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 14, (pieces,), generator=generator).tolist()
    lengths[3] += 40  # more than a micro-batch's share
    tokens_T = torch.randint(0, 61, (sum(lengths),), generator=generator)
    targets_T = tokens_T.roll(-1)
    targets_T[torch.tensor(lengths).cumsum(0) - 1] = IGNORED
    return Batch(tokens_T, targets_T, lengths, [0] * pieces, sum(lengths) - pieces)


def alone(model: Model, parts: list[Batch], runner: LayerRunner, settings: BalanceSection) -> PipelineLoss:
    """As `Run.forward_backward`."""
    balance, total, found = Balance(model, settings), torch.zeros(()), {}
    tokens = sum(len(part.tokens_T) for part in parts)
    for part in parts:
        routing = balance.routing()
        loss = NextToken()(model, part, routing, runner)
        extra = balance.losses(routing, len(part.tokens_T) / tokens)
        sum(extra.values(), loss.total).backward()
        total += loss.total.detach()
        named = {f"loss/{name}": value for name, value in loss.parts.items()}
        for name, value in (named | {f"balance/{name}": value for name, value in extra.items()}).items():
            found[name] = found.get(name, torch.zeros(())) + value.detach()
    return PipelineLoss(total, found)


def same(one: Tensor, other: Tensor, what: str, exact: bool = False) -> None:
    if exact:
        assert torch.equal(one, other), f"{what}: {(one - other).abs().max()} apart"
        return
    apart = float((one - other).abs().max() / other.abs().max().clamp(min=1e-8))
    assert apart < 1e-5, f"{what}: {apart}"


def check(
    rank: int,
    name: str,
    schedule: str,
    stages: Stages,
    micro_batches: int = 4,
    *,
    exact: bool = False,
    runner: LayerRunner = run_plainly,
) -> None:
    """To the bit without balance losses, whose means are taken in another order."""
    settings = BalanceSection() if exact else BALANCE
    whole = model_of(name, sum(map(len, stages.layers)))
    model = keep(copy.deepcopy(whole), stages, rank)
    held = dict(model.named_parameters())
    assert set(held) == {name for name, _ in whole.named_parameters() if stage_holds(name, stages, rank)}
    balance = Balance(model, settings)
    pipeline = Pipeline(model, stages, schedule=schedule)
    for step in range(2):  # the second begins where the first left everything
        parts = batch_of(seed=step).parts(micro_batches)
        assert len({len(part.tokens_T) for part in parts}) > 1, "micro-batches of one length would show less"
        expected = alone(whole, parts, runner, settings)
        found = pipeline.forward_backward(
            parts, NextToken(), runner=runner, routing=balance.routing, extra=balance.losses, count=balance.count
        )
        same(found.total, expected.total, "loss", exact)
        assert set(found.parts) == set(expected.parts)
        for part, value in expected.parts.items():
            same(found.parts[part], value, part, exact and part.startswith("loss"))
        for parameter, tensor in held.items():
            other = whole.get_parameter(parameter)
            assert tensor.grad is not None and other.grad is not None, parameter
            same(tensor.grad, other.grad, parameter, exact and not (parameter == "embed" and stages.embed_twice))
        model.zero_grad()
        whole.zero_grad()
    frozen = pipeline.forward_backward(parts, NextToken(), frozen=True)
    same(frozen.total, expected.total, "frozen loss")  # without gradients other kernels run
    assert all(tensor.grad is None for tensor in held.values())


def two(rank: int, world: int) -> None:
    for name in ("glm-4.5", "deepseek-v3", "qwen3-moe", "qwen3-moe-tied"):
        for exact in (True, False):
            check(rank, name, "1f1b", divide(config(name), 2), exact=exact)
    check(rank, "glm-4.5", "gpipe", divide(config("glm-4.5"), 2, given=[1, 3]), 3, exact=True)
    check(rank, "glm-4.5", "1f1b", divide(config("glm-4.5"), 2, given=[0, 4]), 3, exact=True)
    check(rank, "glm-4.5", "1f1b", divide(config("glm-4.5"), 2, given=[4, 0]), 3, exact=True, runner=recompute)


def test_on_two_processes(tmp_path: Path) -> None:
    on_ranks(2, two, tmp_path)
