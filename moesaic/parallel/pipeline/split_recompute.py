"""Activation checkpointing for schedules that divide the backward pass: a layer is run again once, its rows' gradients
are sent on, and its weights' gradients wait for their turn.

torch divides a graph by taking gradients of rows first and of each group of weights later, and every one of these would
run a checkpointed layer again: 1.8 to 2.5 times the matmuls of a whole step, in small models. Here the layer is run
again when rows' gradients are due, and the graph of that is what is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from moesaic.model.block import Block
from moesaic.model.context import ForwardContext, Routing


class SplitRecompute:
    """`runner` runs a layer; `take` hands over what has come due for weights since it was last called."""

    def __init__(self) -> None:
        self.used = False
        self._due: list[tuple[Block, Any]] = []

    def runner(self, block: Block, number: int, x_TD: Tensor, context: ForwardContext) -> Tensor:
        self.used = True
        found = _Rerun.apply(x_TD, self, block, context)
        layer, routing = block.attention.number, context.routing
        if routing is not None and len(found) > 1:
            routing.logits[layer] = found[1]  # with a gradient, for the balance losses
        return cast(Tensor, found[0])

    def take(self) -> Callable[[], None]:
        due, self._due = self._due, []

        def weights() -> None:
            for block, groups in due:
                stage_backward_weight(block.parameters(), groups)

        return weights

    def later(self, block: Block, groups: Any) -> None:
        self._due.append((block, groups))


class _Rerun(torch.autograd.Function):
    """A layer's rows and, where they are kept, its router's logits."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, split: SplitRecompute, block: Block, context: ForwardContext
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x_TD)
        ctx.given = split, block, context, context.selected
        with torch.enable_grad():  # by the kernels of the second run, so that both choose the same experts
            outputs = _outputs(block, block(x_TD.detach().requires_grad_(), context), context.routing)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        split, block, context, selected = ctx.given
        x_TD = ctx.saved_tensors[0].detach().requires_grad_()
        routing, before = context.routing, context.selected
        context.selected = selected  # what this layer saw, though later ones have selected since
        if routing is not None:
            context.routing = Routing(dict(routing.choices), keep_logits=routing.keep_logits, replay=routing.replay)
        with torch.enable_grad():
            outputs = _outputs(block, block(x_TD, context), context.routing)
            context.routing, context.selected = routing, before
            (rows_TD,), groups = stage_backward_input(list(outputs), list(gradients), [x_TD], block.parameters())
        split.later(block, groups)
        return rows_TD, None, None, None


def _outputs(block: Block, y_TD: Tensor, routing: Routing | None) -> tuple[Tensor, ...]:
    layer = block.attention.number
    return (y_TD, routing.logits[layer]) if routing is not None and layer in routing.logits else (y_TD,)
