"""One attention rank and one expert rank: a wire of their own, so that a death cuts it and no other.

A question is a head (what is asked, of which layer and micro-batch, how many rows and assignments, and which attention
ranks will ask the same) and one message of bytes: the rows that are needed, each once, and the assignments to experts;
the answer is a row for each assignment. Between two ranks all is answered in the order in which it was asked.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moesaic.serve.group.links import MEETING, RankLost, Traffic

END, ROWS, KEEP, STATS = range(4)  # what is asked
LET_IN_SECONDS = 10.0  # for a rank that waits to be let in
PATIENCE = 86400.0  # of an expert rank between two questions: an idle engine is no error


class Head(NamedTuple):
    what: int
    layer: int = 0
    micro: int = 0
    rows: int = 0
    assignments: int = 0
    askers: int = 0  # a bit for each attention rank that has rows of this micro-batch; 0: do not wait for others


HEAD_BYTES = 8 * len(Head._fields)
ASSIGNMENT_BYTES = 12  # expert, row, weight


class Wire:
    """`name` is that of the link in `traffic`, which counts what leaves."""

    def __init__(
        self,
        store: dist.Store,
        attention: int,
        expert: int,
        index: int,
        patience: float,
        traffic: Traffic,
        life: int = 1,
    ) -> None:
        """`index` is 0 at the rank that attends; `life` tells an expert rank from those that died in its place. One
        that takes another's place waits until it is let in, which may be long where nobody asks for anything; it is
        there when it is let in, so the others do not wait for it."""
        self.name, self.other = f"attention {attention} - experts {expert}", 1 - index
        self.patience, self.traffic = timedelta(seconds=patience), traffic
        self.lost: str | None = None  # why it was cut
        named = dist.PrefixStore(f"apart/wire/{attention}/{expert}/{life}", store)
        limit = MEETING if life == 1 else timedelta(seconds=PATIENCE if index else max(LET_IN_SECONDS, patience))
        try:
            self._group: Any = dist.ProcessGroupGloo(named, index, 2, limit)
        except RuntimeError as error:
            raise self._cut(error) from error

    def send(self, *messages: Tensor) -> list[tuple[Any, Tensor]]:
        """Begun; `settle` waits until they have left."""
        self._check()
        begun = []
        for message in messages:
            self.traffic.count(self.name, message.numel() * message.element_size())
            try:
                begun.append((self._group.send([message], self.other, 0), message))
            except RuntimeError as error:
                raise self._cut(error) from error
        return begun

    def begin_receive(self, room: Tensor) -> Any:
        self._check()
        try:
            return self._group.recv([room], self.other, 0)
        except RuntimeError as error:
            raise self._cut(error) from error

    def settle(self, work: Any, patience: timedelta | None = None) -> None:
        self._check()
        try:
            work.wait(patience or self.patience)
        except RuntimeError as error:
            raise self._cut(error) from error

    def receive(self, room: Tensor, patience: timedelta | None = None) -> Tensor:
        self.settle(self.begin_receive(room), patience)
        return room

    def _check(self) -> None:
        if self.lost is not None:
            raise RankLost(f"{self.name}: {self.lost}")

    def _cut(self, error: RuntimeError) -> RankLost:
        self.lost = str(error).strip().splitlines()[0][:200]
        return RankLost(f"{self.name}: {self.lost}")


def head_tensor(head: Head) -> Tensor:
    return torch.tensor(head, dtype=torch.int64)


def read_head(numbers: Tensor) -> Head:
    return Head(*numbers.tolist())


def question(rows_PD: Tensor, expert_A: Tensor, row_A: Tensor, weight_A: Tensor) -> Tensor:
    """As bytes."""
    numbers = torch.stack([expert_A.int(), row_A.int(), weight_A.float().view(torch.int32)], 1)
    return torch.cat([_bytes(rows_PD), _bytes(numbers)])


def question_bytes(rows: int, assignments: int, row_bytes: int) -> int:
    return rows * row_bytes + assignments * ASSIGNMENT_BYTES


def read_question(message: Tensor, head: Head, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows (P, D), and of each assignment its expert, its row and its weight."""
    size = head.rows * width * dtype.itemsize
    # Numbers need an address that suits them, which the rows' bytes before them may not leave.
    rows_PD = message[:size].view(dtype).view(head.rows, width)
    numbers_A3 = message[size:].clone().view(torch.int32).view(-1, 3)
    weight_A = numbers_A3[:, 2].contiguous().view(torch.float32)
    return rows_PD, numbers_A3[:, 0].long(), numbers_A3[:, 1].long(), weight_A


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).flatten() if tensor.numel() else torch.empty(0, dtype=torch.uint8)
