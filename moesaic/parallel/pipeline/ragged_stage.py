"""A `PipelineStage` whose micro-batches differ in length: rows travel unpadded, into memory that exists from when they
are awaited until their backward pass is done. (torch's own has one buffer per micro-batch, all of one shape.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from moesaic.parallel.pipeline.split_recompute import SplitRecompute
from moesaic.parallel.traces import Recorder


@dataclass
class StageWork:
    """What a stage does in this step: `forward(stage, micro-batch, rows or None)`, with `rows[m]` rows each."""

    forward: Callable[[int, int, Tensor | None], Tensor]
    rows: list[int]
    split: SplitRecompute
    recorder: Recorder | None = None

    def operation(self, kind: str, number: int, chunk: int) -> AbstractContextManager[None]:
        if self.recorder is None:
            return nullcontext()
        return self.recorder.operation(kind, micro_batch=number, chunk=chunk)


class _Weights(nn.Module):
    """The parameters of one stage, asked for anew each time: FSDP exchanges them."""

    def __init__(self, weights: Callable[[], Iterator[nn.Parameter]]) -> None:
        super().__init__()
        self.weights = weights

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.weights()


class RaggedStage(PipelineStage):
    work: StageWork

    def __init__(
        self,
        weights: Callable[[], Iterator[nn.Parameter]],
        stage: int,
        stages: int,
        chunk: int,
        like_D: Tensor,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`weights` are those that the stage reads; `like_D` is a hidden state, for its width, dtype and device."""
        none_TD = like_D.new_empty(0, len(like_D)).requires_grad_()  # the real rows are received into others
        number = torch.zeros(1, dtype=torch.long)
        loss = torch.zeros((), device=like_D.device, requires_grad=True)
        super().__init__(
            _Weights(weights),
            stage,
            stages,
            like_D.device,
            input_args=number if stage == 0 else none_TD,
            output_args=loss if stage == stages - 1 else none_TD,
            group=group,
        )
        self.chunk, self.like_D = chunk, like_D

    def forward_maybe_with_nosync(self, *args: Any, number: Tensor) -> Tensor:
        return self.work.forward(self.stage_index, int(number), None if self.is_first else args[0])

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Not when one stage is done, while others of this rank, which share a model, still have gradients to come."""

    def reduce(self, model: FSDPModule) -> None:
        """Sum gradients over the ranks that share the model's parameters, once for all micro-batches and stages."""
        own, self.submod = self.submod, cast(nn.Module, model)
        super().perform_reduce_grad(1)
        self.submod = own

    # -- rows of their own size

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_room(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_room(self, arriving: tuple[Any, ...], number: int) -> None:
        for one in arriving:
            if one.buffer is not None:  # the first stage receives no rows
                one.buffer = self.like_D.new_empty(self.work.rows[number], len(self.like_D))

    def _let_go(self, arrived: tuple[Any, ...]) -> None:
        for one in arrived:
            if one.buffer is not None:
                one.buffer = self.like_D.new_empty(0, len(self.like_D))

    # -- recorded

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.work.operation("forward", fwd_chunk_id, self.chunk):
            out = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._let_go(self.args_recv_info[fwd_chunk_id])  # torch keeps what its backward pass needs
        return out

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.dw_builder = self.work.split.take if self.work.split.used else None
        with self.work.operation("backward", bwd_chunk_id, self.chunk):
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last and self.has_backward:
            self._let_go(self.grad_recv_info[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        with self.work.operation("weight_gradient", bwd_chunk_id, self.chunk):
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
