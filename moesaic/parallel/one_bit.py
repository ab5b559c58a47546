"""The mean of tensors over ranks at one bit per number, with error feedback: the exchange of 1-bit Adam and 0/1 Adam.

    exchange = OneBitExchange(group)
    means, worker_errors, server_errors = exchange.mean(tensors, worker_errors, server_errors)

Two phases, as in the papers. Each tensor is divided among the ranks. A rank compresses all of it and sends every other
rank that one's chunk (all-to-all); the owner of a chunk takes the mean of what arrives, compresses it again, and sends
it to all (all-gather). So every rank ends up with the same bits. What a compression loses is kept and added to what is
compressed next, by the worker in the first phase and by the chunk's owner ("server") in the second.

A number is compressed to its sign, eight to a byte, and each block of BLOCK numbers to their mean magnitude. With whole
rows of a matrix in blocks of their own, a row that is zero (an embedding nobody used) stays zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256  # numbers that share a scale: an eighth of a bit more for each


class OneBitExchange:
    """`sent_bytes` counts what leaves this rank; an all-reduce counts as if it ran in a ring, which sends the least."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.sent_bytes = 0

    def chunk(self, numel: int) -> int:
        """How many numbers of a tensor each rank owns: whole blocks, so a last rank may own less, or none."""
        block = self._block(numel)
        return -(-numel // (self.ranks * block)) * block

    def own_chunk(self, flat: Tensor) -> Tensor:
        """What of a tensor this rank owns."""
        length = self.chunk(len(flat))
        return flat[self.rank * length : (self.rank + 1) * length]

    def mean(
        self, tensors: Sequence[Tensor], worker_errors: Sequence[Tensor], server_errors: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """The means of flat float32 tensors, and the errors to hand in next time; nothing is changed in place.

        A worker error is as large as its tensor, a server error has `chunk(numel)` numbers. All begin as zeros.
        """
        sizes = [len(tensor) for tensor in tensors]
        messages, left_worker = [], []
        for tensor, error in zip(tensors, worker_errors, strict=True):
            chunks_RN = F.pad(tensor + error, (0, self.ranks * self.chunk(len(tensor)) - len(tensor)))
            signs, scales, left = self._compress(chunks_RN.view(self.ranks, -1), len(tensor), range(self.ranks))
            messages += [signs, scales.view(torch.uint8)]
            left_worker.append(left.view(-1)[: len(tensor)])
        sent = torch.cat(messages, dim=1)
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self.group)

        messages, left_server = [], []
        for size, error, received in zip(sizes, server_errors, self._apart(arrived, sizes), strict=True):
            total = error.clone()
            for signs, scales in zip(*received, strict=True):  # rank by rank: the order of a sum decides its bits
                total.add_(_decompress(signs, scales, self._block(size)), alpha=1 / self.ranks)
            signs, scales, left = self._compress(total[None], size, range(self.rank, self.rank + 1))
            messages += [signs, scales.view(torch.uint8)]
            left_server.append(left.view(-1))
        own = torch.cat(messages, dim=1)
        everyone = own.new_empty((self.ranks, own.shape[1]))
        dist.all_gather(list(everyone.unbind()), own[0], group=self.group)
        self.sent_bytes += 2 * (self.ranks - 1) * own.numel()

        means = []
        for size, (signs, scales) in zip(sizes, self._apart(everyone, sizes), strict=True):
            means.append(_decompress(signs, scales, self._block(size)).view(-1)[:size])
        return means, left_worker, left_server

    def full_mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The means at full precision, by one all-reduce."""
        together = torch.cat([tensor.view(-1) for tensor in tensors])
        dist.all_reduce(together, group=self.group)
        together /= self.ranks
        self.sent_bytes += ring_bytes(together, self.ranks)
        return list(together.split([tensor.numel() for tensor in tensors]))

    def sum(self, number: Tensor) -> Tensor:
        """The sum of a scalar."""
        total = number.clone()
        dist.all_reduce(total, group=self.group)
        self.sent_bytes += ring_bytes(total, self.ranks)
        return total

    def _block(self, numel: int) -> int:
        """A tensor too small for a block on each rank is one block on each, so that padding costs little."""
        return BLOCK if numel >= self.ranks * BLOCK else max(-(-numel // (8 * self.ranks)), 1) * 8

    def _compress(self, chunks_RN: Tensor, numel: int, owners: range) -> tuple[Tensor, Tensor, Tensor]:
        """Signs, scales and what is lost of these owners' chunks of a tensor of `numel` numbers."""
        block, length = self._block(numel), chunks_RN.shape[1]
        first = torch.tensor([owner * length for owner in owners], device=chunks_RN.device)
        begins_RB = first[:, None] + torch.arange(0, length, block, device=chunks_RN.device)
        real_RB = (numel - begins_RB).clamp(0, block)  # the rest of a block is padding, at the tensor's end
        numbers_RBK = chunks_RN.view(len(chunks_RN), length // block, block)
        is_real = torch.arange(block, device=chunks_RN.device) < real_RB[..., None]
        numbers_RBK = torch.where(is_real, numbers_RBK, 0.0)
        scales_RB = numbers_RBK.abs().sum(dim=2) / real_RB.clamp(min=1)
        positive = numbers_RBK >= 0
        lost = numbers_RBK - torch.where(positive, scales_RB[..., None], -scales_RB[..., None])
        return _packed(positive.flatten(1)), scales_RB, torch.where(is_real, lost, 0.0)

    def _apart(self, messages_RM: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """The signs and scales of each tensor, of all ranks' messages."""
        lengths = [
            part for size in sizes for part in (self.chunk(size) // 8, self.chunk(size) // self._block(size) * 4)
        ]
        parts = messages_RM.split(lengths, dim=1)
        return [
            (signs, scales.flatten().clone().view(torch.float32).view(len(scales), scales.shape[1] // 4))
            for signs, scales in zip(parts[::2], parts[1::2], strict=True)
        ]


def ring_bytes(tensor: Tensor, ranks: int) -> int:
    """What a rank sends in an all-reduce of a tensor, by reduce-scatter and all-gather in a ring."""
    return 2 * (ranks - 1) * tensor.numel() * tensor.element_size() // ranks


def _packed(positive_RN: Tensor) -> Tensor:
    bits = torch.arange(8, dtype=torch.uint8, device=positive_RN.device)
    eights = positive_RN.unflatten(1, (positive_RN.shape[1] // 8, 8)).to(torch.uint8)
    return (eights << bits).sum(dim=2, dtype=torch.uint8)


def _decompress(signs: Tensor, scales: Tensor, block: int) -> Tensor:
    """The numbers of one chunk, or of several."""
    bits = torch.arange(8, dtype=torch.uint8, device=signs.device)
    positive = (signs[..., None] >> bits) & 1
    blocks = positive.view(*scales.shape, block)
    return torch.where(blocks.bool(), scales[..., None], -scales[..., None]).flatten(-2)
