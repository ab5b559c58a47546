"""Pipelines beside one process that accumulates: loss, its parts and every gradient, on two and four processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moesaic.data.packing import IGNORED, Batch
from moesaic.model.config import Dense, Experts, GroupedQuery, Latent, Layer, ModelConfig, Rope
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from moesaic.parallel.pipeline.schedule import Pipeline
from moesaic.parallel.pipeline.stages import Stages, divide, keep, stage_holds
from moesaic.parallel.pipeline.step import PipelineLoss, Step
from moesaic.recipe import BalanceSection
from moesaic.sharded import whole as entire
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
    first: int = 0,
    runner: LayerRunner = run_plainly,
) -> None:
    """To the bit without balance losses, whose means are taken in another order.

    `first`: micro-batches of the first step, which its schedule cannot run and another does, maybe in another order."""
    settings = BalanceSection() if exact else BALANCE
    whole = model_of(name, sum(map(len, stages.layers)))
    model = keep(copy.deepcopy(whole), stages, rank)
    held = dict(model.named_parameters())
    assert set(held) == {name for name, _ in whole.named_parameters() if stage_holds(name, stages, rank)}
    balance = Balance(model, settings)
    pipeline = Pipeline(model, stages, schedule=schedule)
    run = pipeline.recompute or runner if runner is recompute else runner
    for step in range(2):  # the second begins where the first left everything
        parts = batch_of(seed=step).parts(micro_batches if step else first or micro_batches)
        assert len({len(part.tokens_T) for part in parts}) > 1, "micro-batches of one length would show less"
        expected = alone(whole, parts, runner, settings)
        found = pipeline.forward_backward(
            Step(parts, NextToken(), runner=run, routing=balance.routing, extra=balance.losses, count=balance.count)
        )
        bits = exact and (step > 0 or not first)
        same(found.total, expected.total, "loss", bits)
        assert set(found.parts) == set(expected.parts)
        for part, value in expected.parts.items():
            same(found.parts[part], value, part, bits and part.startswith("loss"))
        for parameter, tensor in held.items():
            other = whole.get_parameter(parameter)
            assert tensor.grad is not None and other.grad is not None, parameter
            same(tensor.grad, other.grad, parameter, bits and not (parameter == "embed" and stages.embed_twice))
        model.zero_grad()
        whole.zero_grad()
    frozen = pipeline.forward_backward(Step(parts, NextToken(), frozen=True))
    same(frozen.total, expected.total, "frozen loss")  # without gradients other kernels run
    assert all(tensor.grad is None for tensor in held.values())


def two(rank: int, world: int) -> None:
    for name in ("glm-4.5", "deepseek-v3", "qwen3-moe", "qwen3-moe-tied"):
        check(rank, name, "1f1b", divide(config(name), 2), exact=True)
    glm = config("glm-4.5")
    check(rank, "glm-4.5", "gpipe", divide(glm, 2, given=[1, 3]), 3)
    check(rank, "glm-4.5", "1f1b", divide(glm, 2, given=[0, 4]), 3)
    check(rank, "glm-4.5", "1f1b", divide(glm, 2, given=[4, 0]), 3, exact=True, runner=recompute)
    for name, runner in (("glm-4.5", recompute), ("deepseek-v3", run_plainly), ("qwen3-moe-tied", run_plainly)):
        looped = divide(config(name), 2, chunks=2)
        check(rank, name, "interleaved", looped, exact=True, first=5, runner=runner)
        check(rank, name, "zero_bubble", looped, runner=runner)
        check(rank, name, "zbv", divide(config(name), 2, chunks=2, shape="v"), runner=runner)
    check(rank, "glm-4.5", "zero_bubble", divide(glm, 2))
    division_costs_nothing(rank)


class Matmuls(TorchDispatchMode):
    """Counts the multiply-adds that run inside."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def division_costs_nothing(rank: int) -> None:
    """A divided backward pass has the matmuls of a whole one; with recompute, each layer is run again once. (torch's
    checkpoint also leaves out a layer's last matmuls when it runs it again.)"""
    found = {}
    for runner in (run_plainly, recompute):
        for schedule in ("1f1b", "zero_bubble"):
            stages = divide(config("glm-4.5"), 2)
            pipeline = Pipeline(keep(model_of("glm-4.5"), stages, rank), stages, schedule=schedule)
            run = pipeline.recompute or runner if runner is recompute else runner
            with Matmuls() as matmuls:
                pipeline.forward_backward(Step(batch_of().parts(4), NextToken(), runner=run))
            total = torch.tensor(matmuls.total)
            dist.all_reduce(total)
            found[runner, schedule] = int(total)
    assert found[run_plainly, "zero_bubble"] == found[run_plainly, "1f1b"] > 0
    assert found[run_plainly, "1f1b"] < found[recompute, "1f1b"] < found[recompute, "zero_bubble"]
    assert found[recompute, "zero_bubble"] < 1.05 * found[recompute, "1f1b"]


def test_on_two_processes(tmp_path: Path) -> None:
    on_ranks(2, two, tmp_path)


def four(rank: int, world: int) -> None:
    check(rank, "glm-4.5", "1f1b", divide(config("glm-4.5", 7), 4, given=[1, 3, 2, 1]), 5, exact=True, first=3)
    check(rank, "qwen3-moe", "interleaved", divide(config("qwen3-moe", 9), 4, chunks=2), 4)
    check(rank, "deepseek-v3", "zero_bubble", divide(config("deepseek-v3", 6), 4, by="cost"), 8)
    check(rank, "glm-4.5", "zbv", divide(config("glm-4.5", 8), 4, chunks=2, shape="v"), 7, runner=recompute)
    with_experts_divided(rank, "glm-4.5", "1f1b", 1)
    with_experts_divided(rank, "deepseek-v3", "zero_bubble", 2)
    with_parameters_divided(rank, "glm-4.5", "1f1b", 1, run_plainly)
    with_parameters_divided(rank, "glm-4.5", "zero_bubble", 2, recompute)


def with_parameters_divided(rank: int, name: str, schedule: str, chunks: int, runner: LayerRunner) -> None:
    """Two stages of two ranks, each with a batch of its own and half of every parameter (FSDP2, ZeRO-3)."""
    stage, data = divmod(rank, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    whole = model_of(name)
    stages = divide(whole.config, 2, chunks=chunks)
    model = keep(copy.deepcopy(whole), stages, stage)
    for block in [*model.layers, *model.mtp]:
        if next(block.parameters(), None) is not None:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=True)
    fully_shard(model, mesh=mesh["dp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    pipeline = Pipeline(model, stages, mesh.get_group("pp"), schedule=schedule)
    balance = Balance(model, BALANCE)
    run = pipeline.recompute or runner if runner is recompute else runner
    for step in range(2):
        parts = [batch_of(seed=2 * step + number).parts(4) for number in range(2)]
        found = pipeline.forward_backward(
            Step(parts[data], NextToken(), runner=run, routing=balance.routing, extra=balance.losses)
        )
        expected = [alone(whole, some, runner, BALANCE) for some in parts][data]
        for part, value in expected.parts.items():
            same(found.parts[part], value, part)
        for parameter, tensor in model.named_parameters():
            other = whole.get_parameter(parameter).grad
            assert tensor.grad is not None and other is not None, parameter
            same(entire(tensor.grad), other, parameter)
        model.zero_grad()
        whole.zero_grad()


def with_experts_divided(rank: int, name: str, schedule: str, chunks: int) -> None:
    """Two stages of two ranks, each with a batch of its own and half of the experts: pp=2 dp=2 ep=2."""
    stage, data = divmod(rank, 2)
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    experts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole = model_of(name)
    stages = divide(whole.config, 2, chunks=chunks)
    model = keep(copy.deepcopy(whole), stages, stage)
    for block in [*model.layers, *(layer.block for layer in model.mtp)]:
        if isinstance(block.ffn, MixtureFeedForward):
            for weight in ("gate_up_EGD", "down_EDF"):
                setattr(block.ffn, weight, nn.Parameter(getattr(block.ffn, weight).detach().chunk(2)[data].clone()))
    model.ops = ExpertParallelKernels(model.ops, Exchange(experts[stage]))  # type: ignore[assignment]
    pipeline = Pipeline(model, stages, pipelines[data], schedule=schedule)
    balance = Balance(model, BALANCE)
    parts = [batch_of(seed=number).parts(4) for number in range(2)]
    found = pipeline.forward_backward(
        Step(parts[data], NextToken(), routing=balance.routing, extra=balance.losses, count=balance.count)
    )
    expected = [alone(whole, some, run_plainly, BALANCE) for some in parts][data]
    same(found.total, expected.total, "loss")
    assert set(found.parts) == set(expected.parts)
    for part, value in expected.parts.items():
        same(found.parts[part], value, part)
    for parameter, tensor in model.named_parameters():
        other = whole.get_parameter(parameter).grad
        assert tensor.grad is not None and other is not None, parameter
        if parameter.endswith(("gate_up_EGD", "down_EDF")):
            other = other.chunk(2)[data]
        else:
            dist.all_reduce(tensor.grad, group=experts[stage])
        same(tensor.grad, other, parameter)


def test_on_four_processes(tmp_path: Path) -> None:
    on_ranks(4, four, tmp_path)
