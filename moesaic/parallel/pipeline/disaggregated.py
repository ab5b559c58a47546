"""DisagMoE (arXiv 2605.11005): attention and experts of every layer on disjoint groups of ranks, in training.

    groups = Groups(*group_sizes(config, ranks), group)              # by a roofline, or as given: Groups(2, 2, group)
    if groups.rank in groups.attention_ranks:
        half = AttentionHalf(model, groups, depth=4)
        loss = half.forward_backward(Step(parts, objective))         # a step, of micro-batches of its own
    else:
        half = ExpertHalf(model, groups)
        half.serve()                                                 # the same step
    half.module.named_parameters()                                   # what this rank holds, by the model's names

An attention rank holds all but the routed experts and has batches of its own; expert ranks divide the experts of each
layer among them. A layer sends each token's row to the ranks of its experts, many to many, and gets the results back. A
message goes one way, from one group to the other, and while it travels both groups work on other micro-batches: up to
`depth` are in flight, some of them forward and some backward (in_flight.py). Routing weights stay with attention, so
rows are all that travels; shared experts and dense layers are computed where attention is. Gradients of experts are
complete; those of an attention rank are of its own batch and add up over attention ranks.

Attention ranks run equally many micro-batches with one objective, so they ask for the same layers in the same order. A
layer that is run again in the backward pass would send its rows again: no recompute here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.kernels import reference
from moesaic.kernels.interface import Dispatched, Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.transformer import Model
from moesaic.parallel.pipeline import in_flight
from moesaic.parallel.pipeline.halves import Groups, Ports, mixtures, only_experts, shares, without_experts
from moesaic.parallel.pipeline.step import PipelineLoss, Step
from moesaic.parallel.traces import Recorder

DONE, FORWARD, BACKWARD, FORWARD_ONLY = range(4)  # what is asked for
HEAD = 3  # numbers before the counts


class AttentionHalf:
    def __init__(self, model: Model, groups: Groups, *, depth: int = 4, recorder: Recorder | None = None) -> None:
        self.groups, self.depth, self.recorder = groups, depth, recorder
        found = mixtures(model)
        self.numbers = {name: number for number, name in enumerate(found)}
        self.shares = [shares(part.router.shape.count, groups.experts) for part in found.values()]
        self.widest = max(max(some) for some in self.shares)
        self.ports = Ports(model.norm.weight.detach(), groups)
        self.module = without_experts(model)
        self.kernels = AwayKernels(model.ops, self)
        model.ops = cast(Kernels, self.kernels)

    def forward_backward(self, step: Step) -> PipelineLoss:
        """This rank's sums, over its own micro-batches."""
        works = [partial(self._micro_batch, step, number) for number in range(len(step.parts))]
        in_flight.run(works, self.depth, apart=2 * (len(self.shares) + 1))  # one ends about as often as one begins
        for rank in self.groups.expert_ranks:
            self.ports.send(self._head(DONE, 0, 0, []), rank)
        self.ports.settle()
        return PipelineLoss(step.found.pop(""), step.found)

    def _micro_batch(self, step: Step, number: int, pause: Callable[[], None]) -> None:
        part = step.parts[number]
        away = Away(self, number, pause, step.frozen)
        self.kernels.of_thread.away = away
        with torch.set_grad_enabled(not step.frozen), away.working():
            routing = step.routing()
            loss = step.objective(self.module, part, routing, step.runner)
            extra = step.extra(routing, len(part.tokens_T) / step.tokens)
        named = {"": loss.total} | {f"loss/{name}": value for name, value in loss.parts.items()} | loss.notes
        for name, value in (named | {f"balance/{name}": value for name, value in extra.items()}).items():
            step.note(name, value)
        if step.frozen:
            return
        step.count(routing)
        away.direction = "backward"
        with away.working():
            torch.autograd.backward(step.scale(sum(extra.values(), loss.total)))

    def _head(self, what: int, number: int, layer: int, counts: Sequence[int]) -> Tensor:
        numbers = [what, number, layer, *counts, *[0] * (self.widest - len(counts))]
        return torch.tensor(numbers, device=self.ports.like_D.device)


class Away:
    """One micro-batch's rows on their way to experts and back."""

    def __init__(self, half: AttentionHalf, number: int, pause: Callable[[], None], frozen: bool) -> None:
        self.half, self.number, self.pause, self.frozen = half, number, pause, frozen
        self.direction = "forward"
        self._span: AbstractContextManager[None] = nullcontext()

    def there_and_back(self, rows_AD: Tensor, layer: int, counts: list[int]) -> Tensor:
        """Rows sorted by expert, for as many from the experts; others work meanwhile."""
        half, ranks = self.half, self.half.groups.expert_ranks
        what = BACKWARD if self.direction == "backward" else FORWARD_ONLY if self.frozen else FORWARD
        held = half.shares[layer]
        sizes, start = [], 0
        for rank, share in zip(ranks, held, strict=True):
            asked = counts[start : start + share]
            half.ports.send(half._head(what, self.number, layer, asked), rank)
            sizes.append(sum(asked))
            start += share
        half.ports.send_rows(rows_AD, sizes, ranks)
        self._stop()
        self.pause()
        with self._recorded(f"recv_{self.direction}"):
            back_AD = half.ports.receive_rows(sizes, ranks)
        half.ports.settle(2 * half.depth * len(ranks))  # what was answered has left long ago
        self._start()
        return back_AD

    @contextmanager
    def working(self) -> Iterator[None]:
        self._start()
        yield
        self._stop()

    def _start(self) -> None:
        self._span = self._recorded(self.direction)
        self._span.__enter__()

    def _stop(self) -> None:
        self._span.__exit__(None, None, None)

    def _recorded(self, kind: str) -> AbstractContextManager[None]:
        recorder = self.half.recorder
        return nullcontext() if recorder is None else recorder.operation(kind, micro_batch=self.number)


class AwayKernels(WrappedKernels):
    """Kernels whose experts are on other ranks, which attention weighs and adds up."""

    def __init__(self, plain: Kernels, half: AttentionHalf) -> None:
        super().__init__(plain)
        self.half = half
        self.of_thread = threading.local()  # a micro-batch has a thread

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        layer = self.half.numbers[weights.site]
        sent = reference.dispatch(x_TD, routes, sum(self.half.shares[layer]))
        y_AD = _Experts.apply(sent.x_AD, self.of_thread.away, layer, sent.counts_E.tolist())
        return reference.combine((y_AD * sent.weights_A1).to(x_TD.dtype), sent)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_AD: Tensor, away: Away, layer: int, counts: list[int]) -> Tensor:
        ctx.asked = away, layer, counts
        return away.there_and_back(x_AD.detach(), layer, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        away, layer, counts = ctx.asked
        return away.there_and_back(gradients[0], layer, counts), None, None, None


class ExpertHalf:
    def __init__(self, model: Model, groups: Groups, *, recorder: Recorder | None = None) -> None:
        self.groups, self.recorder, self.plain = groups, recorder, model.ops
        self.ports = Ports(model.norm.weight.detach(), groups)
        place = groups.rank - groups.attention
        every = [shares(part.router.shape.count, groups.experts) for part in mixtures(model).values()]
        self.widest = max(max(some) for some in every)
        self.module, self.weights = only_experts(model, place, groups.experts)
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def serve(self) -> None:
        """Answer attention ranks until they are done with a step."""
        ranks, device = self.groups.attention_ranks, self.ports.like_D.device
        asked_RN = torch.empty(len(ranks), HEAD + self.widest, dtype=torch.long, device=device)
        while True:
            self.ports.receive(asked_RN.unbind(), ranks)
            what, number, layer = asked_RN[0, :HEAD].tolist()
            assert (asked_RN[:, :HEAD] == asked_RN[0, :HEAD]).all(), "attention ranks ask for different layers"
            if what == DONE:
                break
            counts_RC = asked_RN[:, HEAD : HEAD + len(self.weights[layer].gate_up_EGD)]
            sizes = counts_RC.sum(1).tolist()
            direction = "backward" if what == BACKWARD else "forward"
            with self._recorded(f"recv_{direction}", number):
                rows_AD = self.ports.receive_rows(sizes, ranks)
            with self._recorded(direction, number):
                if what == BACKWARD:
                    found_AD = self._backward(rows_AD, number, layer)
                else:
                    found_AD = self._forward(rows_AD, number, layer, counts_RC, keep=what == FORWARD)
            with self._recorded(f"send_{direction}", number):
                self.ports.send_rows(found_AD, sizes, ranks)
            self.ports.settle(2 * len(ranks))  # replies are taken in order, so waiting for old ones holds up nobody
        assert not self._kept, "every forward has its backward"
        self.ports.settle()

    def _forward(self, rows_AD: Tensor, number: int, layer: int, counts_RC: Tensor, keep: bool) -> Tensor:
        """Rows by rank, and of each rank by expert, to the same for their results."""
        kinds = torch.arange(counts_RC.shape[1], device=rows_AD.device).repeat(len(counts_RC))
        order_A = kinds.repeat_interleave(counts_RC.reshape(-1)).argsort(stable=True)
        x_AD = rows_AD.index_select(0, order_A).requires_grad_(keep)
        ones_A1 = x_AD.new_ones(len(x_AD), 1)  # attention weighs what comes back
        given = Dispatched(x_AD, ones_A1, counts_RC.sum(0), order_A, len(x_AD))
        with torch.set_grad_enabled(keep):
            y_AD = self.plain.compute_experts(given, self.weights[layer])
        if keep:
            self._kept[number, layer] = x_AD, y_AD, order_A
        return torch.empty_like(rows_AD).index_copy_(0, order_A, y_AD.detach())

    def _backward(self, rows_AD: Tensor, number: int, layer: int) -> Tensor:
        x_AD, y_AD, order_A = self._kept.pop((number, layer))
        torch.autograd.backward(y_AD, rows_AD.index_select(0, order_A))
        assert x_AD.grad is not None
        return torch.empty_like(rows_AD).index_copy_(0, order_A, x_AD.grad)

    def _recorded(self, kind: str, number: int) -> AbstractContextManager[None]:
        return nullcontext() if self.recorder is None else self.recorder.operation(kind, micro_batch=number)
