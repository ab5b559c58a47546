"""The experts of a model apart from everything else: who holds which, how rows travel between, how many ranks for each.

A request of an attention rank is a head (what, micro-batch, layer, and how many rows for each expert of the rank that
is asked) and the rows, sorted by expert; the answer is as many rows. Between two ranks all is answered in the order in
which it was asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn

from moesaic.errors import UserError
from moesaic.kernels.layer_weights import ExpertWeights
from moesaic.model.config import Experts, ModelConfig
from moesaic.model.experts import MixtureFeedForward
from moesaic.model.transformer import Model
from moesaic.parallel.pipeline.stages import token_cost


def group_sizes(config: ModelConfig, ranks: int) -> tuple[int, int]:
    """Ranks for attention and for experts so that both compute as long: the roofline where the network is no bound.
    `moesaic.plan.disaggregation.disagmoe.split` weighs ports too, for a kind of device."""
    layers = config.layers + config.mtp
    routed = [layer.ffn.per_token * 3 * layer.ffn.hidden for layer in layers if isinstance(layer.ffn, Experts)]
    if not routed:
        raise UserError("parallel", "this model has no experts to put apart", "Take a mixture.")
    if ranks < 2:
        raise UserError("parallel", f"{ranks} rank for attention and experts", "Take two at least.")
    away = sum(routed) * config.hidden
    heads = (1 + len(config.mtp)) * config.vocab * config.hidden
    here = sum(token_cost(config, layer) for layer in layers) - away + heads
    attention = min(max(round(ranks * here / (here + away)), 1), ranks - 1)
    return attention, ranks - attention


@dataclass(frozen=True)
class Groups:
    """The first `attention` ranks of `group`, and the `experts` behind them. Answers travel in `answers`, another group
    of the same ranks: in one NCCL group a send waits for the ones before it, and so would an answer for a question."""

    attention: int
    experts: int
    group: dist.ProcessGroup | None = None
    answers: dist.ProcessGroup | None = None  # where there is none, `group`

    def __post_init__(self) -> None:
        if dist.get_world_size(self.group) != self.attention + self.experts or min(self.attention, self.experts) < 1:
            problem = f"{self.attention} + {self.experts} ranks, but the group has {dist.get_world_size(self.group)}"
            raise UserError("parallel", problem, "Each half needs a rank at least, and every rank a half.")

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def ways(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The groups in which this rank sends and receives."""
        answers = self.answers if self.answers is not None else self.group
        return (self.group, answers) if self.rank < self.attention else (answers, self.group)

    @property
    def attention_ranks(self) -> range:
        return range(self.attention)

    @property
    def expert_ranks(self) -> range:
        return range(self.attention, self.attention + self.experts)


def mixtures(model: nn.Module) -> dict[str, MixtureFeedForward]:
    """In the order of layers, prediction layers last."""
    return {name: part for name, part in model.named_modules() if isinstance(part, MixtureFeedForward)}


def shares(count: int, ranks: int) -> list[int]:
    """How many of a layer's experts each rank holds, side by side."""
    return [count // ranks + (rank < count % ranks) for rank in range(ranks)]


def without_experts(model: Model) -> Model:
    for part in mixtures(model).values():
        for weight in ("gate_up_EGD", "down_EDF"):
            setattr(part, weight, None)  # still a parameter, of nothing
    return model


def only_experts(model: Model, rank: int, ranks: int) -> tuple[nn.Module, list[ExpertWeights]]:
    """A module of one rank's experts, under their names in the model, and what kernels take of each layer."""
    root, weights = nn.Module(), []
    for name, part in mixtures(model).items():
        inside = root
        for step in name.split("."):
            if step not in inside._modules:
                inside.add_module(step, nn.Module())
            inside = cast(nn.Module, inside._modules[step])
        held = shares(part.router.shape.count, ranks)
        for weight in ("gate_up_EGD", "down_EDF"):
            own = getattr(part, weight).detach().split(held)[rank].clone()
            inside.register_parameter(weight, nn.Parameter(own))
        weights.append(ExpertWeights(inside.gate_up_EGD, inside.down_EDF, part.activation, name))
    return root, weights


class Ports:
    """Rows of one width to and from the ranks of the other group, and a count of the bytes that left."""

    def __init__(self, like_D: Tensor, groups: Groups) -> None:
        """`like_D`: a row, for its width, dtype and device."""
        self.like_D, self.sent_bytes = like_D, 0
        self._out, self._in = groups.ways
        self._leaving: deque[tuple[Tensor, dist.Work]] = deque()  # memory that must last until it has left

    def send(self, message: Tensor, rank: int) -> None:
        self.sent_bytes += message.numel() * message.element_size()
        begun = dist.isend(message, group=self._out, group_dst=rank)
        self._leaving.append((message, cast(dist.Work, begun)))

    def send_rows(self, rows_AD: Tensor, sizes: Sequence[int], ranks: range) -> None:
        for rank, rows in zip(ranks, rows_AD.contiguous().split(list(sizes)), strict=True):
            if len(rows):
                self.send(rows, rank)

    def receive(self, messages: Sequence[Tensor], ranks: range) -> None:
        begun = [
            cast(dist.Work, dist.irecv(message, group=self._in, group_src=rank))
            for rank, message in zip(ranks, messages, strict=True)
            if len(message)
        ]
        for waiting in begun:
            waiting.wait()

    def receive_rows(self, sizes: Sequence[int], ranks: range) -> Tensor:
        rows_AD = self.like_D.new_empty(sum(sizes), len(self.like_D))
        self.receive(rows_AD.split(list(sizes)), ranks)
        return rows_AD

    def settle(self, most: int = 0) -> None:
        """Wait until at most `most` messages are still leaving."""
        while len(self._leaving) > most:
            self._leaving.popleft()[1].wait()
