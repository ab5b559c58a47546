"""Layers streamed through a few buffers, one after the other (DeepSpeed Inference's ZeRO-Inference).

Before a layer runs, its weights have come into a buffer, and those of the layer after it begin to come into another;
after the last layer comes the first, for the next step. Memory is the buffers, the embedding, the output matrix and the
KV cache. Every layer is read in every step however few its tokens, so this is for large batches. A layer's parameters
are views of the buffer it is in: kernels, and whoever wraps them, find ordinary tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moesaic.serve.offload.layer_store import LayerStore, bytes_of, laid_out
from moesaic.serve.offload.transfers import Job, Transfers

BUFFERS = 2


@dataclass
class StreamCounts:
    layers: int = 0  # that ran
    late: int = 0  # of those, the ones that nobody had begun to fetch
    fetched: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0  # that the host waited for copies


class StreamedLayers:
    """`blocks` run in this order, over and over; they keep their parameters, which hold values only while they run."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        store: LayerStore,
        device: torch.device,
        transfers: Transfers,
        buffers: int = BUFFERS,
    ) -> None:
        assert buffers > 1
        self.store, self.transfers, self.counts = store, transfers, StreamCounts()
        self._tensors = [list(tensors_of(block)) for block in blocks]
        sizes = [bytes_of(tensors) for tensors in self._tensors]
        self._buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(buffers)]
        self._memory = [[buffer[:size] for buffer in self._buffers] for size in sizes]
        self._views = [[laid_out(part, ts) for part in parts] for parts, ts in zip(self._memory, self._tensors)]
        self._holds: list[int | None] = [None] * buffers  # the layer in each buffer, or on its way there
        self._bound: list[int | None] = [None] * len(blocks)  # the buffer each layer's parameters are views of
        self._jobs: list[Job | None] = [None] * buffers
        self._running = 0  # the buffer of the layer that runs
        for number, block in enumerate(blocks):
            for leaf, view in zip(leaves_of(block), self._views[number][0], strict=True):
                leaf.assign(view)
            self._bound[number] = 0
            self._tensors[number] = list(tensors_of(block))
            block.register_forward_pre_hook(Arrival(self, number))

    @property
    def bytes(self) -> int:
        """Of the buffers."""
        return sum(buffer.numel() for buffer in self._buffers)

    def arrive(self, number: int) -> None:
        """A layer is about to run: it needs its weights, and the next one will."""
        counts = self.counts
        counts.layers += 1
        if number not in self._holds:
            counts.late += 1
            self._fetch(number)
        here = self._running = self._holds.index(number)
        self._bind(number, here)
        begun = time.perf_counter()
        if (job := self._jobs[here]) is not None:
            self._jobs[here] = None
            try:
                job.wait()
            except BaseException:
                self._holds[here] = None
                raise
        counts.wait_seconds += time.perf_counter() - begun
        following = (number + 1) % len(self._bound)
        if following not in self._holds:
            self._fetch(following)

    def _fetch(self, number: int) -> None:
        """Into the buffer after that of the layer that runs: of all, its layer will be wanted last."""
        into = (self._running + 1) % len(self._buffers)
        if (job := self._jobs[into]) is not None and not job.cancel():
            with contextlib.suppress(Exception):  # nobody has asked for what it fetched
                job.wait()
        self._holds[into] = number
        memory = self._memory[number][into]
        self._jobs[into] = self.transfers.begin(partial(self.store.read, number, memory), self.transfers.mark())
        self.counts.fetched += 1
        self.counts.bytes += memory.numel()

    def _bind(self, number: int, buffer: int) -> None:
        if self._bound[number] != buffer:
            for tensor, view in zip(self._tensors[number], self._views[number][buffer], strict=True):
                tensor.data = view
            self._bound[number] = buffer


@dataclass(frozen=True)
class Arrival:
    """What is called before a layer runs."""

    streamed: StreamedLayers
    number: int

    def __call__(self, block: nn.Module, given: Any) -> None:
        self.streamed.arrive(self.number)


def streamed_layers(blocks: Iterable[nn.Module]) -> StreamedLayers | None:
    """Who brings these layers, if somebody does."""
    hooks = (hook for block in blocks for hook in block._forward_pre_hooks.values())
    return next((hook.streamed for hook in hooks if isinstance(hook, Arrival)), None)


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer of a module."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        found: Tensor | None = self.module._parameters.get(self.name)
        found = self.module._buffers[self.name] if found is None else found
        assert found is not None
        return found

    def assign(self, tensor: Tensor) -> None:
        if self.name in self.module._buffers:
            self.module._buffers[self.name] = (
                tensor.detach()
            )  # not itself: whoever lets it lie elsewhere moves it alone
        else:
            self.module._parameters[self.name] = nn.Parameter(tensor, requires_grad=False)


def leaves_of(block: nn.Module) -> list[Leaf]:
    """Every tensor of a block, in a fixed order."""
    return [
        Leaf(module, name)
        for module in block.modules()
        for kind in (module._parameters, module._buffers)
        for name, tensor in kind.items()
        if tensor is not None
    ]


def tensors_of(block: nn.Module) -> list[Tensor]:
    return [leaf.tensor for leaf in leaves_of(block)]
