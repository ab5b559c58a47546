"""A model's share on this rank: made without the whole ever being in memory, with kernels that talk to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

from moesaic import kernels
from moesaic.kernels.interface import Kernels, Mode
from moesaic.model.config import ModelConfig
from moesaic.model.transformer import Model
from moesaic.parallel.context.kernels import ContextParallelKernels
from moesaic.parallel.division import Division
from moesaic.parallel.experts.exchange import Exchange
from moesaic.parallel.experts.kernels import ExpertParallelKernels
from moesaic.parallel.experts.nodes import NodeExchange
from moesaic.parallel.gradients import OrderedReduceScatter, keep_logits_beside
from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.options import ParallelOptions
from moesaic.parallel.pipeline.stages import keep, stages_of
from moesaic.parallel.tensor.kernels import TensorParallelKernels
from moesaic.sharded import local

# (a parameter's name, the box of it that is wanted) -> that box
ReadBox = Callable[[str, tuple[slice, ...]], Tensor]


def spread(
    config: ModelConfig, mesh: ParallelMesh, dtype: torch.dtype, options: ParallelOptions, mode: Mode = "fast"
) -> tuple[Model, Division]:
    """The model with this rank's part of every parameter, still to be filled."""
    with torch.device("meta"):
        model = Model(config, mode).to(dtype)
    stages = stages_of(config, mesh.layout, options) if mesh.layout.pp > 1 else None
    division = Division(model, mesh, stages)
    if stages is not None:
        keep(model, stages, mesh.place.pp)
    for name, parameter in list(model.named_parameters()):
        if (shape := division.local_shape(name)) != parameter.shape:
            _replace(model, name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    if mesh.layout.zero:
        _shard(model, division, mesh, options)
    model.to_empty(device=mesh.device)
    model.ops = _kernels(kernels.choose(mesh.device, model.mode), config, mesh, options)
    return model, division


@torch.no_grad()
def fill(model: Model, division: Division, read: ReadBox) -> None:
    for name, tensor in model.state_dict().items():
        for region in division.regions(name, tensor):
            local(tensor)[region.here] = read(name, region.whole).to(tensor.dtype)


def _kernels(plain: Kernels, config: ModelConfig, mesh: ParallelMesh, options: ParallelOptions) -> Any:
    """Rows are divided among cp ranks, and what each has among its tp ranks; experts take whatever rows there are."""
    ops: Any = plain
    if mesh.layout.tp > 1:
        tiles, keep_rows = options.tiles, not options.regather
        ops = TensorParallelKernels(ops, mesh.group("tp"), config, tiles=tiles, keep=keep_rows)
    if mesh.layout.cp > 1:
        ops = ContextParallelKernels(ops, mesh.group("cp"), method=options.context)
    if mesh.layout.ep > 1:
        exchange = Exchange(mesh.group("ep"), mesh.activity)
        nodes = None
        if options.dispatch == "node":
            nodes = NodeExchange(*(Exchange(group, mesh.activity) for group in mesh.nodes(options.node_ranks)))
        ops = ExpertParallelKernels(
            ops,
            exchange,
            chunks=options.chunks,
            dispatch=options.dispatch,
            nodes=nodes,
            exact=options.exact,
            shadow=options.shadow,
        )
    return ops


def _shard(model: Model, division: Division, mesh: ParallelMesh, options: ParallelOptions) -> None:
    """FSDP2 over every layer and what is left: each kind of parameter among the ranks that share it."""
    if mesh.stage.size() == 1:
        return
    alone = {parameter for name, parameter in model.named_parameters() if mesh.sharers(division.kind(name)).size() == 1}
    names = {parameter: name for name, parameter in model.named_parameters()}
    infos: dict[str, Any] = {}

    def placement(parameter: nn.Parameter) -> Any:
        kind = division.kind(names[parameter])
        if mesh.sharers(kind).size() == mesh.stage.size():  # the same ranks
            return None
        if kind not in infos:
            infos[kind] = _mesh_info(mesh, kind, options.replicas)
        return ShardPlacementResult(Shard(0), infos[kind])

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    copies = options.replicas
    how: dict[str, Any] = {
        "mesh": mesh.stage if copies == 1 else mesh.replicated("dense", copies),
        "mp_policy": policy,
        "ignored_params": alone,
        "shard_placement_fn": placement,
    }
    for block in [*model.layers, *model.mtp]:
        if next(block.parameters(), None) is None:  # of another pipeline stage
            continue
        fully_shard(block, reshard_after_forward=mesh.layout.zero == 3, **how)
        block.register_forward_hook(keep_logits_beside)
    fully_shard(model, **how)
    for module in sharded(model):
        module.set_gradient_divide_factor(1.0)  # losses are divided by the batch's count: gradients add up
        module.set_force_sum_reduction_for_comms(True)
        if options.exact:
            # Not by its setter, which refuses parameters on several meshes: ours is told the group at each call.
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._reduce_scatter_comm = OrderedReduceScatter()  # type: ignore[assignment]


def _mesh_info(mesh: ParallelMesh, kind: str, replicas: int) -> FSDPMeshInfo:
    if replicas == 1:
        return FSDPMeshInfo(mesh.sharers(kind), shard_mesh_dim=0)
    return HSDPMeshInfo(mesh.replicated(kind, replicas), shard_mesh_dim=1, replicate_mesh_dim=0)


def sharded(model: nn.Module) -> Iterable[FSDPModule]:
    """The modules whose parameters FSDP gathers together."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _replace(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)
