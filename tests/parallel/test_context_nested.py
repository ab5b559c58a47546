"""Context-parallel ranks with other divisions, on four processes: of heads (tp) within, of parameters (FSDP2) over all,
with layers that are computed again in the backward pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moesaic.parallel.context.kernels import ContextParallelKernels
from moesaic.parallel.rows import RowSplit
from moesaic.parallel.tensor.kernels import TensorParallelKernels
from moesaic.parallel.tensor.partition import shard_model
from moesaic.sharded import whole as gathered
from moesaic.train.layer_runners.recompute import recompute
from tests.parallel.ranks import on_ranks
from tests.parallel.test_tensor import CONFIGS, LENGTHS, batch_of, compare, model_of, near, rows_of, run

TP = 2
WAYS: list[tuple[str, dict[str, Any]]] = [
    ("GLM-4.5", {"method": "ring"}),
    ("everything", {"method": "mesh", "tile": (2, 1)}),
    ("DeepSeek-V3", {"method": "mesh", "tile": (2, 1)}),
    ("sparse", {"split": "zigzag"}),
]


def around_tensor_ranks(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (world // TP, TP), mesh_dim_names=("cp", "tp"))
    cp, tp = mesh.get_group("cp"), mesh.get_group("tp")
    outer, inner = dist.get_rank(cp), dist.get_rank(tp)
    batch = batch_of(LENGTHS)
    for name, options in WAYS:
        whole = model_of(CONFIGS[name])
        model = copy.deepcopy(whole)
        parts = shard_model(model, inner, TP)
        ops = ContextParallelKernels(TensorParallelKernels(model.ops, tp, model.config), cp, **options)
        model.ops = ops
        rows_N = RowSplit.of(LENGTHS, world // TP, ops.kind).parts[outer]
        rows_N = rows_N[rows_of(len(rows_N), inner, TP)]
        compare(run(model, batch), run(whole, batch), parts, rows_N, beside=cp)


def with_divided_parameters(rank: int, world: int) -> None:
    """Parameters are let go of behind a layer's forward, and are there again when the gradient written by hand reads
    them; layers are computed again, and exchange again."""
    mesh = init_device_mesh("cpu", (world,))
    batch = batch_of(LENGTHS)
    for name, options in (("DeepSeek-V3", {"method": "mesh"}), ("GLM-4.5", {}), ("sparse", {})):
        whole = model_of(CONFIGS[name])
        model = copy.deepcopy(whole)
        for block in [*model.layers, *model.mtp]:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        model.ops = ContextParallelKernels(model.ops, **options)
        found, expected = run(model, batch, recompute), run(whole, batch)
        noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
        for parameter, other in expected.gradients.items():
            own = gathered(found.gradients[parameter]) * world  # FSDP took the mean of what is a sum
            near(own, other, f"{name}: {parameter}", noise)


def nested(rank: int, world: int) -> None:
    around_tensor_ranks(rank, world)
    with_divided_parameters(rank, world)


def test_with_other_divisions(tmp_path: Path) -> None:
    on_ranks(4, nested, tmp_path)
