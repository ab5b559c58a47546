"""The ranks of a mesh that train one model: what each must hear of the others in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels, Mode
from moesaic.model.config import ModelConfig
from moesaic.model.context import Routing
from moesaic.model.formats.checkpoint import Source
from moesaic.model.formats.opening import is_compressed, open_checkpoint
from moesaic.model.transformer import Model
from moesaic.parallel.boxes import first_boxes, stored_boxes
from moesaic.parallel.context.kernels import split_for
from moesaic.parallel.division import Division
from moesaic.parallel.gradients import global_norm, reduce_replicated
from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.options import ParallelOptions
from moesaic.parallel.pipeline.schedule import Pipeline
from moesaic.parallel.pipeline.step import MicroBatch
from moesaic.parallel.rows import RowGroup, RowSplit, gather_rows
from moesaic.parallel.spread import fill, sharded, spread
from moesaic.parallel.staying_up.redundancy import Redundancy
from moesaic.parallel.staying_up.upkeep import Upkeep
from moesaic.parallel.turns import TurnKernels, gather_weights
from moesaic.parallel.world import World
from moesaic.sharded import local


class Ranks(World):
    def __init__(self, mesh: ParallelMesh, options: ParallelOptions) -> None:
        super().__init__(mesh.device)
        self.mesh, self.options = mesh, options
        self.rank, self.ranks, self.is_main = mesh.rank, mesh.ranks, mesh.is_main
        self.data_rank, self.data_ranks = mesh.place.dp, mesh.layout.dp
        self.data_group = mesh.group("dp")
        self.row_ranks = mesh.layout.cp * mesh.layout.tp
        self.context_rows, self.tensor_rows = RowGroup(mesh.group("cp")), RowGroup(mesh.group("tp"))
        self.upkeep = Upkeep(mesh, options)
        self.division: Division

    def build(self, config: ModelConfig, dtype: torch.dtype, weights: Source | int, mode: Mode = "fast") -> Model:
        """This rank's share of it; the whole is never in memory."""
        if not isinstance(weights, int) and is_compressed(weights):
            raise UserError(weights.place, "is quantized, and cannot be trained", "Name the model it was made from.")
        model, self.division = spread(config, self.mesh, dtype, self.options, mode)
        if isinstance(weights, int):
            fill(model, self.division, first_boxes(config, self.division.shapes, weights))
        else:
            fill(model, self.division, stored_boxes(weights))
        if self.division.stages is not None:
            schedule, rows = self.options.schedule, self._rows_here
            timings = self.upkeep.timings
            self.pipeline = Pipeline(
                model,
                self.division.stages,
                self.mesh.group("pp"),
                schedule=schedule,
                rows=rows,
                recorder=timings.recorder if timings is not None else None,
            )
        return model

    @torch.no_grad()
    def copy(self, model: Model) -> Model:
        made, _ = spread(model.config, self.mesh, model.dtype, self.options, model.mode)
        for own, given in zip(made.state_dict().values(), model.state_dict().values(), strict=True):
            local(own).copy_(local(given))
        made.tokenizer = model.tokenizer
        return made

    def whole_tensors(self, model: Model) -> Iterator[tuple[str, Tensor]]:
        own = model.state_dict()
        for name in self.division.shapes:
            yield name, self.division.assemble(name, own.get(name), own.get(name))

    def _rows_here(self, part: MicroBatch) -> int:
        """Of a micro-batch, how many rows this rank has between layers."""
        here = RowSplit.of(part.lengths, self.mesh.layout.cp, split_for(self.options.context)).counts[
            self.mesh.place.cp
        ]
        return RowSplit.of([here], self.mesh.layout.tp).counts[self.mesh.place.tp]

    def barrier(self) -> None:
        self.mesh.barrier()

    @property
    def restarted(self) -> bool:
        return self.upkeep.cut_off is not None

    def watched(self, out: Path, signs: Sequence[str], events: str) -> AbstractContextManager[None]:
        return self.upkeep.watched(out, signs, events)

    def doing(
        self, operation: str, *, step: int | None = None, patient: bool = False, **facts: Any
    ) -> AbstractContextManager[None]:
        return self.upkeep.doing(operation, step=step, patient=patient, **facts)

    @property
    def redundancy(self) -> Redundancy | None:
        return self.upkeep.redundancy

    def after_step(self, model: nn.Module, note: Callable[..., None]) -> None:
        self.upkeep.after_step(model, note)

    def resumed(self, step: int, again: int, note: Callable[..., None]) -> None:
        self.upkeep.resumed(step, again, note)

    def any(self, flag: bool) -> bool:
        said = torch.tensor([flag], dtype=torch.int32)
        dist.all_reduce(said, dist.ReduceOp.MAX)
        return bool(said)

    def add_up(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.upkeep.own_loss = values.get("total")
        if not values:
            return {}
        stacked_N = torch.stack([value.detach().float().reshape(()) for value in values.values()])
        group = self.mesh.group("stage")  # all stages of a pipeline have found the same
        found = [torch.empty_like(stacked_N) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, stacked_N, group=group)
        total_N = found[0].clone()
        for other_N in found[1:]:  # in the order of ranks, so that the bits are the same everywhere and every time
            total_N += other_N
        largest_N = torch.stack(found).amax(0)
        return {
            name: largest if name.endswith("_max") else total
            for name, total, largest in zip(values, total_N, largest_N, strict=True)
        }

    def total(self, values_N: Tensor) -> Tensor:
        dist.all_reduce(values_N, group=self.data_group)
        return values_N

    def from_main(self, values_N: Tensor) -> Tensor:
        values_N = values_N.clone()
        dist.broadcast(values_N, src=0, group=self.mesh.host)
        return values_N

    def collect(self, value: Any) -> list[Any]:
        return self.mesh.collect(value)

    def add_up_counts(self, counts_N: Tensor) -> Tensor:
        dist.all_reduce(counts_N, group=self.mesh.group("stage"))
        return counts_N

    def all_loads(self, loads: dict[int, Tensor]) -> dict[int, Tensor]:
        if self.pipeline is None:
            return loads
        said = self.mesh.collect(
            [[layer, counts_E.tolist()] for layer, counts_E in loads.items()], self.mesh.group("pp")
        )
        return {layer: torch.tensor(counts) for stage in said for layer, counts in stage}

    def whole_routing(self, routing: Routing) -> Routing:
        if self.row_ranks == 1:
            return routing
        layout, place = self.mesh.layout, self.mesh.place
        whole = replace(routing, logits={}, choices={})
        split = RowSplit.of(routing.lengths, layout.cp, split_for(self.options.context), self.device)
        among = RowSplit.of([split.counts[place.cp]], layout.tp, device=self.device)

        def gathered(rows_T: Tensor) -> Tensor:
            rows_T = gather_rows(rows_T, among, self.tensor_rows, gradient="own")
            return gather_rows(rows_T, split, self.context_rows, gradient="own")

        for layer, logits_TE in routing.logits.items():
            whole.logits[layer] = gathered(logits_TE)
            whole.choices[layer] = gathered(routing.choices[layer])
        return whole

    def reduce_gradients(self, model: nn.Module) -> None:
        reduce_replicated(model, self.division, self.options.exact)

    def load(self, model: Model, place: Path) -> None:
        fill(model, self.division, stored_boxes(open_checkpoint(place)))

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Embedding, norm and head are gathered by the whole model's forward, layers by their own."""
        if not isinstance(model, FSDPModule):
            yield
            return
        model.unshard()
        try:
            yield
        finally:
            for module in sharded(model):  # layers, too, stay gathered after a forward that no backward follows
                module.reshard()

    @contextmanager
    def generating(self, model: Model) -> Iterator[None]:
        """The engine computes with this rank's own shares: experts stay where they are, and what zero divides is
        gathered, once for all completions, or with zero=3 layer by layer in every forward."""
        if isinstance(model, FSDPModule):
            gather_weights(model)
        try:
            if self.mesh.layout.ep == 1 and self.mesh.layout.zero < 3:
                yield
            else:
                turns = TurnKernels(model.ops, self.mesh.host)
                model.ops = cast(Kernels, turns)
                try:
                    yield
                finally:
                    model.ops = turns.plain
                turns.keep_company(model)
        finally:
            for module in sharded(model):
                module.reshard()

    def norm(self, model: nn.Module) -> Tensor:
        norm = global_norm(dict(model.named_parameters()), self.division, self.options.exact)
        self.upkeep.look_at_gradients(model, norm)
        return norm
