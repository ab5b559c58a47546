"""A step of training on a pipeline: each rank holds some layers (stages.py), and micro-batches pass through all.

    stages = divide(model.config, ranks=4)
    keep(model, stages, rank)
    model.ops = ...                                     # kernels for experts, context and tensor parallelism first
    pipeline = Pipeline(model, stages, group, schedule="1f1b")
    loss = pipeline.forward_backward(Step(parts, objective))  # in place of a loop over parts: loss.total, loss.parts

`group` is this pipeline's: its rank r holds `stages.of_rank(r)`. Every rank of it calls `forward_backward` with the
same micro-batches (`Batch.parts(accumulate, device)`) and gets the same loss. Gradients are those of one process that
accumulates over the micro-batches, already summed for an embedding that two stages hold, and not yet over other ranks
except those of an FSDP model's mesh, over which they are reduced once per step. Whoever sets up a run asks
`check_schedule` first; a single batch that falls into a number of micro-batches that its schedule cannot run, as a
short last one may, runs all forward first (gpipe). The other arguments are what a run has:

    runner          how a layer is run (recompute, token drop, ...): `LayerRunners.runner(step)`
    routing         makes the record of a forward's routes: `Balance.routing`
    extra           losses of those routes and their share of the batch: `Balance.losses`
    count           is given the routes of every micro-batch: `Balance.count`
    scale           of the loss before the backward pass: `LossScale.apply`
    frozen          only forward, without gradients

`Balance(model, ...)` of a model that was cut sees this rank's layers only, so its bias updates and loads are theirs.
Losses per layer are means over all mixture layers, here as there; a layer that layer dropping leaves out counts too.

Schedules are torch.distributed.pipelining's: `gpipe` and `1f1b` (one stage per rank), `interleaved` (several),
`zero_bubble` (ZB1P, one or several) and `zbv` (a V of two), which divide the backward pass into gradients of rows and
of weights. These two keep an FSDP model's parameters whole from forward to backward, as ZeRO-2 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from moesaic.errors import UserError
from moesaic.kernels.interface import Kernels
from moesaic.model.block import Block
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.context import ForwardContext
from moesaic.model.layout import Layout
from moesaic.model.transformer import LayerRunner, Model
from moesaic.parallel.pipeline.aux_loss import with_loss
from moesaic.parallel.pipeline.kernels import StageKernels
from moesaic.parallel.pipeline.ragged_stage import RaggedStage, StageWork
from moesaic.parallel.pipeline.split_recompute import SplitRecompute
from moesaic.parallel.pipeline.stages import Stages, belongs, misfit
from moesaic.parallel.pipeline.step import MicroBatch, PipelineLoss, Step
from moesaic.parallel.pipeline.totals import over_stages
from moesaic.parallel.traces import Recorder
from moesaic.sharded import local

SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}
SPLIT = ("zero_bubble", "zbv")


class Pipeline:
    def __init__(
        self,
        model: Model,
        stages: Stages,
        group: dist.ProcessGroup | None = None,
        *,
        schedule: str = "1f1b",
        rows: Callable[[MicroBatch], int] | None = None,
        dtype: torch.dtype | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`rows`: how many rows of a micro-batch this rank has between layers, where context or tensor parallelism
        divides them; `dtype`: of hidden states, where it is not the model's."""
        if dist.get_world_size(group) != stages.ranks:
            ranks = dist.get_world_size(group)
            raise UserError("parallel.pp", f"stages for {stages.ranks} ranks, but the group has {ranks}")
        self.model, self.stages, self.group, self.schedule = model, stages, group, schedule
        self.rank, self.device = dist.get_rank(group), model.device
        self.mine = stages.of_rank(self.rank)
        self.rows = rows or (lambda part: len(part.tokens_T))
        self.recorder = recorder
        self.kernels = StageKernels(model.ops, model.norm)
        model.ops = cast(Kernels, self.kernels)
        self._like_D = torch.empty(model.config.hidden, dtype=dtype or model.dtype, device=self.device)
        if isinstance(model, FSDPModule) and schedule in SPLIT:  # gradients of weights come when rows' have long passed
            model.set_reshard_after_forward(False)
        self._split = SplitRecompute()
        self._mixtures = _mixtures(model.config)
        self._made: dict[int, tuple[list[RaggedStage], Any]] = {}  # by number of micro-batches

    @property
    def recompute(self) -> LayerRunner | None:
        """How a layer is run that keeps its input only, where the backward pass is divided; None where any way will
        do. What runs a layer plainly or drops it may stand around it."""
        return self._split.runner if self.schedule in SPLIT else None

    def forward_backward(self, step: Step) -> PipelineLoss:
        if step.frozen:
            with torch.no_grad():
                self._forward_only(step)
        else:
            self._both_ways(step)
            self._sum_embedding()
        total = over_stages(step.found, self.group, self.device)
        return PipelineLoss(total.pop(""), total)

    def _both_ways(self, step: Step) -> None:
        made, schedule = self._schedule(len(step.parts))
        rows = [self.rows(part) for part in step.parts]
        self._split.used = False
        work = StageWork(partial(self._forward, step), rows, self._split, self.recorder)
        for stage in made:
            stage.work = work
        numbers = torch.arange(len(step.parts))
        sharded = self.model if isinstance(self.model, FSDPModule) else None
        if sharded is not None:  # gradients add up here until the last is there
            sharded.set_is_last_backward(False)
            sharded.set_reshard_after_backward(False)
            sharded.set_requires_gradient_sync(False)
        with torch.enable_grad():
            schedule.step(numbers, target=numbers, number=numbers, return_outputs=False)
        if sharded is not None:
            made[0].reduce(sharded)
        for stage in made:
            stage.clear_runtime_states()
            del stage.work

    def _forward_only(self, step: Step) -> None:
        """Stage by stage, every micro-batch; torch's schedules cannot do without their backward pass on a V."""
        here: dict[int, Tensor] = {}  # rows between two stages of this rank
        sent: list[dist.Work] = []
        for stage in self.mine:
            before, after = self.stages.rank_of(stage - 1), self.stages.rank_of(stage + 1)
            for number, part in enumerate(step.parts):
                rows_TD = None
                if stage and before == self.rank:
                    rows_TD = here.pop(number)
                elif stage:
                    rows_TD = self._like_D.new_empty(self.rows(part), len(self._like_D))
                    dist.recv(rows_TD, group=self.group, group_src=before)
                out = self._forward(step, stage, number, rows_TD)
                if stage != self.stages.last and after == self.rank:
                    here[number] = out
                elif stage != self.stages.last:
                    sent.append(cast(dist.Work, dist.isend(out.contiguous(), group=self.group, group_dst=after)))
        for waiting in sent:
            waiting.wait()

    def _forward(self, step: Step, stage: int, number: int, rows_TD: Tensor | None) -> Tensor:
        part, is_last = step.parts[number], stage == self.stages.last
        routing = step.routing()
        layers = self.stages.layers[stage]
        runner = only(layers, step.runner)
        self.kernels.enter(part.tokens_T, rows_TD, finishes=is_last)
        if is_last:
            loss = step.objective(self.model, part, routing, runner)
            out = loss.total
            step.note("", out)
            for name, value in ({f"loss/{name}": value for name, value in loss.parts.items()} | loss.notes).items():
                step.note(name, value)
        else:
            layout = Layout(part.lengths, device=part.tokens_T.device)
            out = self.model(part.tokens_T if rows_TD is None else rows_TD, layout, routing, runner)
        share = len(part.tokens_T) / step.tokens * len(routing.logits) / max(1, self._mixtures)
        extra = step.extra(routing, share)
        for name, value in extra.items():
            step.note(f"balance/{name}", value)
        if step.frozen:
            return out
        step.count(routing)
        if is_last:
            return step.scale(sum(extra.values(), out))
        return with_loss(out, step.scale(sum(extra.values(), out.new_zeros(())))) if extra else out

    def _schedule(self, micro_batches: int) -> tuple[list[RaggedStage], Any]:
        if micro_batches not in self._made:
            made = [
                RaggedStage(partial(self._weights, stage), stage, self.stages.count, chunk, self._like_D, self.group)
                for chunk, stage in enumerate(self.mine)
            ]
            kind: Any = SCHEDULES[self.schedule]
            if misfit(self.schedule, self.stages, micro_batches):
                kind = pipelining.ScheduleGPipe if self.stages.chunks == 1 else pipelining.ScheduleLoopedBFS
            given = made if issubclass(kind, PipelineScheduleMulti) else made[0]
            schedule = kind(given, micro_batches, loss_fn=lambda loss, number: loss, scale_grads=False)
            self._made[micro_batches] = made, schedule
        return self._made[micro_batches]

    def _weights(self, stage: int) -> Iterator[nn.Parameter]:
        return (weight for name, weight in self.model.named_parameters() if belongs(name, self.stages, stage))

    def _sum_embedding(self) -> None:
        """The first and the last stage add up their gradients of the embedding, each to the same bits."""
        ends = self.stages.rank_of(0), self.stages.rank_of(self.stages.last)
        if not self.stages.shares_embedding or self.rank not in ends:
            return
        peer = ends[0] if self.rank == ends[1] else ends[1]
        embed = self.model.embed
        if embed.grad is None:
            embed.grad = torch.zeros_like(embed)
        mine = local(embed.grad)
        theirs = torch.empty_like(mine)
        sent = dist.P2POp(dist.isend, mine.contiguous(), group=self.group, group_peer=peer)
        came = dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer)
        for waiting in dist.batch_isend_irecv([sent, came]):
            waiting.wait()
        mine += theirs


def only(layers: range, inner: LayerRunner) -> LayerRunner:
    """Run these layers; the others are another stage's."""

    def runner(block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
        return inner(block, number, x_TD, context) if number in layers else x_TD

    return runner


def _mixtures(config: ModelConfig) -> int:
    return sum(isinstance(layer.ffn, Experts) for layer in config.layers + config.mtp)
