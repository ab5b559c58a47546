"""A rank that holds experts and nothing else: it answers the rows that attention ranks send, and keeps no state of any
request, so whatever it was asked can be asked of another.

Attention ranks that have rows of the same micro-batch are waited for, and all their rows go through the experts at
once: weights are read once for all of them. A row is computed by itself to the same bits, so neither its company nor
the rank that computes it shows in the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.interface import Kernels, Routes
from moesaic.serve.group.apart.wires import (
    END,
    KEEP,
    PATIENCE,
    STATS,
    Head,
    Wire,
    head_tensor,
    question_bytes,
    read_head,
    read_question,
)
from moesaic.serve.group.experts.slots import ExpertReader, LayerExperts
from moesaic.serve.group.links import RankLost
from moesaic.serve.group.rank_state import peak_bytes

# What happened: "attention" or "experts", layer, micro-batch; called before and after it is done.
Watch = Callable[[str, int, int, bool], None]


class ExpertRankStats(NamedTuple):
    """Bytes of experts, how many it holds and how many it ever read; questions and assignments that it computed; the
    most memory it ever had, in bytes, and what it sent."""

    bytes: int
    held: int
    read: int
    questions: int
    assignments: int
    peak: int
    sent: int
    messages: int


class Question(NamedTuple):
    rows_PD: Tensor
    expert_A: Tensor
    row_A: Tensor
    weight_A: Tensor


class ExpertRank:
    """`wires` lead to the attention ranks, by their numbers."""

    def __init__(
        self, reader: ExpertReader, layers: dict[int, LayerExperts], wires: dict[int, Wire], ops: Kernels
    ) -> None:
        self.reader, self.layers, self.wires, self.ops = reader, layers, wires, ops
        self.watch: Watch | None = None
        self.questions = 0  # that were computed, each of one or more attention ranks
        self.assignments = 0  # in them
        self.problem: BaseException | None = None
        self._meetings: dict[tuple[int, int], dict[int, Question]] = {}
        self._answers: dict[tuple[int, int, int], Tensor] = {}
        self._changed = threading.Condition()
        self._computing = threading.Lock()

    @property
    def bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers.values())

    def stats(self) -> ExpertRankStats:
        held = sum(len(layer.held) for layer in self.layers.values())
        traffic = next(iter(self.wires.values())).traffic  # one for all wires
        sent, messages = sum(traffic.bytes.values()), sum(traffic.messages.values())
        done = (self.reader.read_experts, self.questions, self.assignments)
        return ExpertRankStats(self.bytes, held, *done, peak_bytes(self.reader.device), sent, messages)

    def serve(self) -> None:
        """Until all attention ranks say so (returns), or one is lost (raises)."""
        threads = [
            threading.Thread(target=self._listen, args=(asker, wire), name=wire.name, daemon=True)
            for asker, wire in self.wires.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and self.problem is None:
                thread.join(0.2)
        if self.problem is not None:
            raise self.problem

    # On a thread for each attention rank

    def _listen(self, asker: int, wire: Wire) -> None:
        try:
            with torch.inference_mode():
                while self._answer(asker, wire):
                    pass
        except BaseException as error:
            with self._changed:
                self.problem = self.problem or error
                self._changed.notify_all()

    def _answer(self, asker: int, wire: Wire) -> bool:
        patience = timedelta(seconds=PATIENCE)
        head = read_head(wire.receive(torch.empty(len(Head._fields), dtype=torch.int64), patience))
        if head.what == END:
            return False
        if head.what == KEEP:
            experts = wire.receive(torch.empty(head.rows, dtype=torch.int64)).tolist()
            with self._computing:
                read = self.layers[head.layer].keep(experts)
            self._send(wire, torch.tensor([read]))
            return True
        if head.what == STATS:
            self._send(wire, torch.tensor(self.stats()))
            return True
        width, dtype = self.reader.config.hidden, self.reader.dtype
        size = question_bytes(head.rows, head.assignments, width * dtype.itemsize)
        message = torch.empty(size, dtype=torch.uint8)
        if size:
            wire.receive(message)
        answer_AD = self._together(asker, head, Question(*read_question(message, head, width, dtype)))
        if len(answer_AD):
            self._send(wire, answer_AD)
        return True

    def _send(self, wire: Wire, message: Tensor) -> None:
        for work, _ in wire.send(message):
            wire.settle(work)

    def _together(self, asker: int, head: Head, asked: Question) -> Tensor:
        """What this attention rank gets, once all that were to ask have asked."""
        if head.askers in (0, 1 << asker):
            return self._compute(head, {asker: asked})[asker]
        key = (head.layer, head.micro)
        with self._changed:
            meeting = self._meetings.setdefault(key, {})
            meeting[asker] = asked
            if sum(1 << one for one in meeting) == head.askers:
                del self._meetings[key]
                for one, answer_AD in self._compute(head, meeting).items():
                    self._answers[(*key, one)] = answer_AD
                self._changed.notify_all()
            while (*key, asker) not in self._answers:
                if self.problem is not None:
                    raise RankLost("another attention rank is gone")
                self._changed.wait()
            return self._answers.pop((*key, asker))

    def _compute(self, head: Head, asked: dict[int, Question]) -> dict[int, Tensor]:
        """Every assignment as a token of its own with one expert."""
        with self._computing:
            self._watched(head, False)
            layer, questions = self.layers[head.layer], list(asked.values())
            x_AD = torch.cat([one.rows_PD.index_select(0, one.row_A) for one in questions])
            y_AD = x_AD
            if len(x_AD):
                self.questions += 1
                self.assignments += len(x_AD)
                slot_A = layer.slots_of(torch.cat([one.expert_A for one in questions]))
                weight_A = torch.cat([one.weight_A for one in questions])
                device = self.reader.device
                routes = Routes(slot_A.unsqueeze(1).to(device), weight_A.unsqueeze(1).to(device))
                y_AD = self.ops.experts(x_AD.to(device), routes, layer.weights).cpu()
            self._watched(head, True)
        sizes = [len(one.expert_A) for one in questions]
        return dict(zip(asked, (part.contiguous() for part in y_AD.split(sizes)), strict=True))

    def _watched(self, head: Head, done: bool) -> None:
        if self.watch is not None:
            self.watch("experts", head.layer, head.micro, done)


def end(wires: dict[int, Wire]) -> None:
    """Tell expert ranks that nobody will ask any more."""
    tell(wires, Head(END))


def tell(wires: dict[int, Wire], head: Head, *more: Tensor) -> list[int]:
    """The same to every rank that is there; those that took it."""
    told: list[tuple[int, Any]] = []
    for rank, wire in wires.items():
        try:
            told.extend((rank, work) for work, _ in wire.send(head_tensor(head), *more))
        except RankLost:
            continue
    reached = set(wires)
    for rank, work in told:
        try:
            wires[rank].settle(work)
        except RankLost:
            reached.discard(rank)
    return sorted(rank for rank in reached if wires[rank].lost is None)
