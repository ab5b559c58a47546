"""What one bit per weight loses is made up for at the next exchange (error feedback of 1-bit Adam and 0/1 Adam)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from moesaic.parallel import one_bit

RANKS, TIMES, SIZE = 2, 64, 1000


class Threads:
    """As much of torch.distributed as an exchange asks for, among threads of this process."""

    def __init__(self) -> None:
        self.own = threading.local()
        self.barrier = threading.Barrier(RANKS, timeout=60)
        self.sent: dict[int, Tensor] = {}

    def get_world_size(self, group: object) -> int:
        return RANKS

    def get_rank(self, group: object) -> int:
        return int(self.own.rank)

    def _everyone(self, sent: Tensor) -> list[Tensor]:
        self.sent[self.own.rank] = sent
        self.barrier.wait()
        found = [self.sent[rank] for rank in range(RANKS)]
        self.barrier.wait()
        return found

    def all_to_all_single(self, out: Tensor, sent: Tensor, group: object) -> None:
        out.copy_(torch.stack([theirs[self.own.rank] for theirs in self._everyone(sent)]))

    def all_gather(self, out: list[Tensor], sent: Tensor, group: object) -> None:
        for room, theirs in zip(out, self._everyone(sent), strict=True):
            room.copy_(theirs)


@pytest.mark.parametrize("seed", range(3))
def test_over_many_exchanges_nothing_is_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors that stay the same, the sum of all means that were received is short of the true one by what is still
    to be sent, and no more: it nears it as one over the number of exchanges. Signs and scales alone never do."""
    threads = Threads()
    monkeypatch.setattr(one_bit, "dist", threads)
    wanted = [torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * seed + rank)) for rank in range(RANKS)]

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor, list[float]]:
        threads.own.rank = rank
        group: Any = None
        exchange = one_bit.OneBitExchange(group)
        worker, server, total, off = [torch.zeros(SIZE)], [torch.zeros(exchange.chunk(SIZE))], torch.zeros(SIZE), []
        mean = torch.stack(wanted).mean(0)
        for number in range(1, TIMES + 1):
            (received,), worker, server = exchange.mean([wanted[rank]], worker, server)
            total += received
            off.append(float((total / number - mean).norm() / mean.norm()))
        return total, worker[0], server[0], off

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(work, range(RANKS)))
    (total, _, _, off), (other, *_) = found
    assert torch.equal(total, other)  # all ranks get the same
    assert off[0] > 0.5 and off[-1] < 0.35 * off[0] and off[-1] < 0.7 * off[TIMES // 4]
    missing = torch.stack([worker for _, worker, _, _ in found]).mean(0)
    missing += torch.cat([server for _, _, server, _ in found])[:SIZE]
    torch.testing.assert_close(TIMES * torch.stack(wanted).mean(0) - total, missing, rtol=1e-3, atol=1e-3)
