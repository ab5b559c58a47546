"""Tensor parallel ranks within other divisions, on four processes: of a sequence (cp), of the data with FSDP2 (dp)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.parallel.context.kernels import ContextParallelKernels
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from moesaic.parallel.rows import RowSplit
from moesaic.parallel.tensor.kernels import TensorParallelKernels
from moesaic.parallel.tensor.partition import shard_model
from moesaic.sharded import whole as gathered
from moesaic.train.objectives.next_token import NextToken
from tests.parallel.ranks import on_ranks
from tests.parallel.test_tensor import (
    CONFIGS,
    DEEPSEEK,
    GLM,
    LENGTHS,
    batch_of,
    compare,
    model_of,
    near,
    own_experts,
    rows_of,
    run,
)

TP = 2


def within_context(rank: int, world: int) -> None:
    """cp=2 tp=2, and experts on all four: a rank has its half of the rows its context rank has."""
    mesh = init_device_mesh("cpu", (world // TP, TP), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh.get_group("cp"), mesh.get_group("tp")
    outer, inner = dist.get_rank(cp), dist.get_rank(tp)
    batch = batch_of(LENGTHS)
    for config in (GLM, DEEPSEEK, CONFIGS["sparse"]):
        for split in ("contiguous", "zigzag"):
            whole = model_of(config)
            model = copy.deepcopy(whole)
            parts = shard_model(model, inner, TP)
            own_experts(model, rank, world)
            ops: Any = TensorParallelKernels(model.ops, tp, config, tiles=2)
            model.ops = ExpertParallelKernels(ContextParallelKernels(ops, cp, split=split), Exchange())
            rows_N = RowSplit.of(LENGTHS, world // TP, split).parts[outer]
            rows_N = rows_N[rows_of(len(rows_N), inner, TP)]
            compare(run(model, batch), run(whole, batch), parts, rows_N, beside=cp)
            # What a loss over whole sequences reads, which every rank computes.
            layout, all_T3 = Layout(LENGTHS), torch.randn(sum(LENGTHS), 3, generator=torch.Generator().manual_seed(9))
            own_N3 = all_T3[rows_N].requires_grad_()
            found_T3 = model.ops.gather(own_N3, layout)
            assert torch.equal(found_T3, all_T3)
            (found_T3 * all_T3.square()).sum().backward()
            assert own_N3.grad is not None and torch.equal(own_N3.grad, all_T3.square()[rows_N])


def within_data(rank: int, world: int) -> None:
    """dp=2 tp=2: FSDP2 divides what is left of each parameter among data ranks, which have other sequences."""
    mesh = init_device_mesh("cpu", (world // TP, TP), mesh_dim_names=("dp", "tp"))
    data, tp = dist.get_rank(mesh.get_group("dp")), mesh.get_group("tp")
    batches = [batch_of([7, 4, 12]), batch_of([9, 2, 5, 5])]
    for config in (GLM, DEEPSEEK):
        whole = model_of(config)
        for batch in batches:
            batch.count = sum(one.count for one in batches)
            NextToken()(whole, batch, Routing()).total.backward()

        model = copy.deepcopy(whole)
        model.zero_grad()
        parts = shard_model(model, dist.get_rank(tp), TP)
        model.ops = TensorParallelKernels(model.ops, tp, config, tiles=2, keep=False)
        blocks = [*model.layers, *model.mtp]
        for block in blocks:
            fully_shard(block, mesh=mesh["dp"])
        NextToken()(model, batches[data], Routing()).total.backward()

        noise = 1e-7 * max(float(p.grad.abs().max()) for p in whole.parameters() if p.grad is not None)
        for name, parameter in model.named_parameters():
            gradient, part = parameter.grad, parts[name]
            assert gradient is not None
            gradient = gathered(gradient).clone()  # of the data ranks' shares
            if name.startswith(("layers.", "mtp.")):
                gradient *= world // TP  # FSDP took the mean of what is a sum already
            else:
                dist.all_reduce(gradient, group=mesh.get_group("dp"))
            if part is None:
                dist.all_reduce(gradient, group=tp)
            expected = whole.get_parameter(name).grad
            assert expected is not None
            near(gradient, expected if part is None else part.take(expected), name, noise)


def nested(rank: int, world: int) -> None:
    within_context(rank, world)
    within_data(rank, world)


def test_within_context_and_data_ranks(tmp_path: Path) -> None:
    on_ranks(4, nested, tmp_path)
