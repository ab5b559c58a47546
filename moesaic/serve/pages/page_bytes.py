"""A page of the KV cache as bytes, all of it or a box of its key heads.

For each kind of row ("index", "keys", "latent", "values"), for each layer that keeps it: the page's rows, in order, of
the box's heads. Whoever keeps other heads of the same pages writes the same box to where these heads are with him. Rows
without heads (latent attention) are in every box whole.

    bytes of a page = page size * bytes of a number * sum over layers of (heads in the box * head size, keys and values;
                      or the width of a latent row, and of an index row)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moesaic.model.layout import PagedCache, movable

BY_HEADS = ("keys", "values")


class PageBytes:
    """`heads` are the key heads this cache holds, counted as in the whole model."""

    def __init__(self, cache: PagedCache, heads: range | None = None) -> None:
        self.cache = cache
        self.kinds = sorted({kind for layer in cache.layers for kind in layer})
        held = [layer["keys"].shape[2] for layer in cache.layers if "keys" in layer]
        self.heads = heads if heads is not None else range(held[0] if held else 0)
        assert all(count == len(self.heads) for count in held), "all layers hold the same key heads"

    @property
    def by_heads(self) -> bool:
        return len(self.heads) > 0

    def size(self, box: range | None = None) -> int:
        """Bytes of one page, in a box of key heads."""
        heads = len(self.heads if box is None else box)
        total = 0
        for layer in self.cache.layers:
            for kind, tensor in layer.items():
                row = tensor[0, 0].numel()
                total += (row // len(self.heads) * heads if kind in BY_HEADS else row) * tensor.itemsize
        return total * self.cache.page_size

    def read(self, pages: Sequence[int], box: range | None = None, out: Tensor | None = None) -> Tensor:
        """The bytes of some pages (pages, bytes); written to `out`, where that is given, without waiting for it."""
        if out is None:
            out = torch.empty(len(pages), self.size(box), dtype=torch.uint8, device=self._device)
        for page, row in zip(pages, out, strict=True):
            for here, there in self._parts(page, row, box):
                there.copy_(here, non_blocking=True)
        return out

    def write(self, pages: Sequence[int], data: Tensor, box: range | None = None) -> None:
        """What `read` gave, to some pages of this cache."""
        assert data.shape == (len(pages), self.size(box)), "as many bytes as the pages have"
        for page, row in zip(pages, data, strict=True):
            for here, there in self._parts(page, row, box):
                here.copy_(there, non_blocking=True)

    def _parts(self, page: int, row: Tensor, box: range | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Of one page what lies together in the cache, and where in a row of bytes that is."""
        start = 0
        for tensors in self._tensors():
            for tensor in tensors:
                here = movable(tensor)[:, page]  # (layers, size, ...)
                here = here[:, :, self._local(box)] if here.ndim == 4 else here
                stop = start + here.nbytes
                yield here, row[start:stop].view(here.dtype).view(here.shape)
                start = stop

    @property
    def _device(self) -> torch.device:
        return next(iter(self.cache.layers[0].values())).device

    def _local(self, box: range | None) -> slice:
        if box is None:
            return slice(None)
        assert not len(box) or (box.start >= self.heads.start and box.stop <= self.heads.stop)
        return slice(box.start - self.heads.start, box.stop - self.heads.start)

    def _tensors(self) -> list[list[Tensor]]:
        """Of each kind the tensors (layers, pages, size, ...) in order: one, where those of all layers are one."""
        return [
            [self.cache.whole[kind]]
            if kind in self.cache.whole
            else [layer[kind][None] for layer in self.cache.layers if kind in layer]
            for kind in self.kinds
        ]
