"""Gradients of many ranks: added up in the order of ranks where bits must not depend on it, and their norm over all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.model.block import PredictionBlock
from moesaic.model.context import ForwardContext
from moesaic.parallel.division import Division, rows_of
from moesaic.sharded import local


class OrderedReduceScatter:
    """For FSDP: every rank gets the others' pieces of its shard and adds them up first to last, so that the sum is the
    one that a single process has after as many micro-batches. The library's order depends on the number of ranks."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        found = torch.empty_like(input_tensor)
        dist.all_to_all_single(found, input_tensor, group=group)
        output_tensor.copy_(_in_order(list(found.chunk(dist.get_world_size(group)))))


def _in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class BesideOutput(torch.autograd.Function):
    """Rows pass unchanged. A layer's router logits leave it beside its output, for the balance losses, and so their
    gradient would come back before FSDP hears of the layer's backward pass; behind this it comes with the output's."""

    @staticmethod
    def forward(ctx: Any, output_TD: Tensor, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        return output_TD.view_as(output_TD), logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[1]


def keep_logits_beside(layer: Any, given: tuple[Any, ...], output_TD: Tensor) -> Tensor:
    """A forward hook of a layer."""
    context: ForwardContext = given[-1]
    number: int = (layer.block if isinstance(layer, PredictionBlock) else layer).attention.number
    if context.routing is None or number not in context.routing.logits or not torch.is_grad_enabled():
        return output_TD
    logits = context.routing.logits
    output_TD, logits[number] = BesideOutput.apply(output_TD, logits[number])
    return output_TD


@torch.no_grad()
def reduce_replicated(model: nn.Module, division: Division, exact: bool) -> None:
    """The sum of the gradients of whatever several ranks hold whole, on each of them."""
    for name, parameter in model.named_parameters():
        group = division.mesh.sharers(division.kind(name)).get_group()
        if parameter.grad is None or local(parameter) is not parameter or dist.get_world_size(group) == 1:
            continue
        if exact:
            parts = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, parameter.grad.contiguous(), group=group)
            parameter.grad.copy_(_in_order(parts))
        else:
            dist.all_reduce(parameter.grad, group=group)


def _learning(parameters: Mapping[str, nn.Parameter], division: Division) -> list[str]:
    """Parameters that have a gradient on some rank: others (prediction layers that no loss asks) have no part in the
    norm of one process, in which even a 0 would move the terms that are summed."""
    has_N = torch.zeros(len(division.parameters), dtype=torch.int32)
    for number, name in enumerate(division.parameters):
        has_N[number] = name in parameters and parameters[name].grad is not None
    dist.all_reduce(has_N, dist.ReduceOp.MAX)
    return [name for name, has in zip(division.parameters, has_N.tolist(), strict=True) if has]


@torch.no_grad()
def global_norm(parameters: Mapping[str, nn.Parameter], division: Division, exact: bool) -> Tensor:
    """Of the gradients of all parameters, each element counted once. `exact` has the bits of one process, by sending
    every gradient to every rank."""
    if exact:
        norms: list[Tensor] = []
        for name in _learning(parameters, division):
            parameter = parameters.get(name)
            whole = division.assemble(name, parameter, parameter.grad if parameter is not None else None)
            norms += torch._foreach_norm([whole], 2.0, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))
    squares = torch.zeros((), device=division.mesh.device, dtype=torch.float32)
    for name, parameter in parameters.items():
        if parameter.grad is None or division.is_copy(name):
            continue
        own, part, rows = local(parameter.grad), division.part(name), rows_of(parameter)
        if part is None:
            found = torch.linalg.vector_norm(own, dtype=torch.float32).square()
        else:
            found = part.squares(own, rows[0] if rows is not None else 0)
        squares += found / division.copies(name, parameter)
    dist.all_reduce(squares)
    return squares.sqrt()
