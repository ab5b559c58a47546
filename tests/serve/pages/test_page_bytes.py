"""The bytes of a page are as many as the formula says, and written elsewhere they are the same page."""

from __future__ import annotations

import pytest
import torch

from moesaic.model.layout import PagedCache, movable
from moesaic.serve.pages.page_bytes import PageBytes

GROUPED = {"keys": (4, 6), "values": (4, 6)}
LATENT = {"latent": (10,)}
INDEXED = {"latent": (10,), "index": (3,)}


def cache_of(layers: list[dict[str, tuple[int, ...]]], dtype: torch.dtype, seed: int) -> PagedCache:
    cache = PagedCache(layers, 5, 8, dtype)
    made = torch.Generator().manual_seed(seed)
    for layer in cache.layers:
        for tensor in layer.values():
            tensor.copy_(torch.randn(tensor.shape, generator=made))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layers", [[GROUPED] * 3, [LATENT] * 2, [INDEXED, LATENT, INDEXED]])
def test_whole_pages(layers: list[dict[str, tuple[int, ...]]], dtype: torch.dtype) -> None:
    source, target = cache_of(layers, dtype, 0), cache_of(layers, dtype, 1)
    wide = sum(torch.Size(shape).numel() for layer in layers for shape in layer.values())
    there, here = PageBytes(source), PageBytes(target)
    data = there.read([4, 1])
    assert data.shape == (2, 8 * dtype.itemsize * wide) and there.size() == data.shape[1] and data.dtype == torch.uint8
    before = [{kind: tensor.clone() for kind, tensor in layer.items()} for layer in target.layers]
    here.write([0, 3], data)
    for ours, theirs, old in zip(target.layers, source.layers, before, strict=True):
        for kind in ours:
            assert torch.equal(movable(ours[kind])[[0, 3]], movable(theirs[kind])[[4, 1]])
            assert torch.equal(movable(ours[kind])[[1, 2, 4]], movable(old[kind])[[1, 2, 4]])
    assert torch.equal(here.read([0, 3]), data)


@pytest.mark.parametrize("kept", [(4, 1), (2, 2), (1, 4), (4, 2)])
def test_boxes_of_heads_between_ranks_that_hold_others(kept: tuple[int, int]) -> None:
    """Rank by rank: what each holds of the whole model's heads, there in `kept[0]` parts and here in `kept[1]`."""
    whole = cache_of([GROUPED] * 3, torch.bfloat16, 0)

    def part(heads: range, filled: bool) -> PageBytes:
        cache = PagedCache([{"keys": (len(heads), 6), "values": (len(heads), 6)}] * 3, 5, 8, torch.bfloat16)
        if filled:
            for ours, theirs in zip(cache.layers, whole.layers, strict=True):
                for kind in ours:
                    ours[kind].copy_(theirs[kind][:, :, heads.start : heads.stop])
        return PageBytes(cache, heads)

    def parts(count: int, filled: bool) -> list[PageBytes]:
        wide = 4 // count
        return [part(range(start, start + wide), filled) for start in range(0, 4, wide)]

    senders, receivers = parts(kept[0], True), parts(kept[1], False)
    for receiver in receivers:
        for sender in senders:
            box = range(max(sender.heads.start, receiver.heads.start), min(sender.heads.stop, receiver.heads.stop))
            if len(box):
                data = sender.read([2], box)
                assert data.shape[1] == sender.size(box) == receiver.size(box) == 8 * 2 * 3 * 2 * len(box) * 6
                receiver.write([1], data, box)
    for receiver in receivers:
        for ours, theirs in zip(receiver.cache.layers, whole.layers, strict=True):
            for kind in ours:
                heads = slice(receiver.heads.start, receiver.heads.stop)
                assert torch.equal(ours[kind][1], theirs[kind][2][:, heads])
