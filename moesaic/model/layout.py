"""How a flat batch is laid out: where each sequence begins, where each token stands, where its keys and values live.

There is no padding and no separate prefill or decode: a sequence brings any number of new tokens, after any number of
tokens already in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """One sequence's share of the flat batch: rows `start:stop`, behind `cached` tokens of its own."""

    number: int
    start: int
    stop: int
    cached: int

    @property
    def new(self) -> int:
        return self.stop - self.start

    @property
    def total(self) -> int:
        return self.cached + self.new


LARGEST = 448.0  # number of 8 bits


def rounded(new_T: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is kept; what is too large for 8 bits becomes the largest they have."""
    return (new_T.clamp(-LARGEST, LARGEST) if dtype == torch.float8_e4m3fn else new_T).to(dtype)


def movable(tensor: Tensor) -> Tensor:
    """The same memory, as what all of torch's functions can move."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def prefix_TT(tokens: int, prefix: int) -> Tensor:
    """Which of a sequence's tokens each of them sees: all before it, and those of the prefix all of the prefix."""
    sees_TT = torch.ones(tokens, tokens, dtype=torch.bool).tril_()
    sees_TT[:prefix, :prefix] = True
    return sees_TT


class SequenceStates:
    """What layers keep of a sequence as a whole, however long it is: `layers[i]` maps a name to a tensor (places, ...),
    float32. Who has which place is the caller's business; a sequence that begins does not read what lies there."""

    def __init__(
        self, shapes: Sequence[dict[str, tuple[int, ...]]], places: int, device: torch.device | str = "cpu"
    ) -> None:
        self.places = places
        self.layers = [
            {name: torch.empty(places, *shape, dtype=torch.float32, device=device) for name, shape in layer.items()}
            for layer in shapes
        ]

    def copy(self, source: int, target: int) -> None:
        for layer in self.layers:
            for tensor in layer.values():
                tensor[target] = tensor[source]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.values())


class PagedCache:
    """Keys and values of all layers in pages of `page_size` tokens; who owns which page is the caller's business.

    `layers[i]` maps a name ("keys", "values", "latent", "index") to a tensor of shape (pages, page_size, ...). Where
    all layers keep something of the same shape their tensors lie one after the other, and `whole[name]` is all of them.
    """

    def __init__(
        self,
        shapes: Sequence[dict[str, tuple[int, ...]]],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        states: SequenceStates | None = None,
    ) -> None:
        self.states = states
        self.page_size = page_size
        self.pages = pages
        # On a CPU memory that was never written costs nothing, and a row is never read before it is written.
        new = torch.empty if torch.device(device).type == "cpu" else torch.zeros
        self.whole: dict[str, Tensor] = {}
        for name, shape in (shapes[0] if shapes else {}).items():
            if all(layer.get(name) == shape for layer in shapes):
                self.whole[name] = new(len(shapes), pages, page_size, *shape, dtype=dtype, device=device)
        self.layers = [
            {
                name: self.whole[name][number]
                if name in self.whole
                else new(pages, page_size, *shape, dtype=dtype, device=device)
                for name, shape in layer.items()
            }
            for number, layer in enumerate(shapes)
        ]

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one page to another."""
        for layer in self.layers:
            for tensor in layer.values():
                movable(tensor)[target, :rows] = movable(tensor)[source, :rows]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move single rows, numbered through all pages; all are read before any is written."""
        for layer in self.layers:
            for tensor in layer.values():
                flat = movable(tensor).flatten(0, 1)
                flat[list(targets)] = flat[list(sources)]


class Layout:
    """The lengths of the new pieces of a flat batch, what is cached before them, and each token's position.

    Layout([3, 2])                                       two whole sequences
    Layout([1, 4], cached=[9, 0], cache=cache, pages=[[0, 2], [5]])     one extended by a token, one begun

    A sequence's new tokens may be a tree of draft tokens instead of a line: `trees[number]` then says which new tokens
    each new token sees (new, new; itself and its ancestors, which come before it), `positions` how deep each stands.
    Of the first `prefixes[number]` tokens of a sequence each sees all of them (GLM's part A, a prefix language model).
    Where the cache has states, `states[number]` is the place of a sequence's own.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        cached: Sequence[int] | None = None,
        positions: Tensor | None = None,
        cache: PagedCache | None = None,
        pages: Sequence[Sequence[int]] | None = None,
        trees: Sequence[Tensor | None] | None = None,
        prefixes: Sequence[int] | None = None,
        token_types: Tensor | None = None,
        facts: Sequence[Sequence[Sequence[int]]] | None = None,
        states: Sequence[int] | None = None,
        cached_elsewhere: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        assert trees is None or positions is not None, "the tokens of a tree need positions"
        paged = cache is not None and pages is not None
        # Elsewhere: by the kernels that attend, as for requests whose KV cache is pruned or quantized.
        assert cached is None or paged or cached_elsewhere, "cached tokens need a cache and its pages"
        self.cache = cache
        self.pages = pages
        self.states = states
        if cache is not None and cache.states is not None:
            assert states is not None and len({*states}) == len(lengths), "each sequence has a state of its own"
        if prefixes is not None and any(prefixes):
            begun = [prefix for prefix, before in zip(prefixes, cached or [], strict=False) if before]
            assert not any(begun), "a prefix is computed at once, before anything is cached"
            trees = [
                prefix_TT(length, prefix) if prefix > 1 else tree
                for length, prefix, tree in zip(lengths, prefixes, trees or [None] * len(lengths), strict=True)
            ]
            trees = [None if tree is None else tree.to(device) for tree in trees]
        self.trees = trees
        self.is_cached = cache is not None or cached_elsewhere
        self.token_types = token_types  # of encoders that read pairs: which of the two texts each token is of
        self.facts = facts  # what each sequence may read, in place of the model's own knowledge base
        self.device = torch.device(device)
        self.spans: list[Span] = []
        start = 0
        for number, length in enumerate(lengths):
            self.spans.append(Span(number, start, start + length, cached[number] if cached else 0))
            start += length
        self.tokens = start
        self._positions = positions
        if cache is not None:
            assert pages is not None and len(pages) == len(self.spans), "one list of pages for each sequence"
            for span in self.spans:
                assert span.total <= len(pages[span.number]) * cache.page_size, f"sequence {span.number} lacks pages"

    @cached_property
    def positions_T(self) -> Tensor:
        if self._positions is not None:
            return self._positions
        return self._host([position for span in self.spans for position in range(span.cached, span.total)])

    @cached_property
    def totals_T(self) -> Tensor:
        """For each token the length of its sequence so far, the new tokens included."""
        if self._positions is None:
            return self._host([span.total for span in self.spans for _ in range(span.new)])
        lengths = [
            (int(self._positions[span.start : span.stop].max()) + 1, span.new) for span in self.spans if span.new
        ]
        return self._host([length for length, new in lengths for _ in range(new)])

    @cached_property
    def starts_S1(self) -> Tensor:
        return self._host([span.start for span in self.spans] + [self.tokens], torch.int32)

    @cached_property
    def slots_T(self) -> Tensor:
        """The cache row each new token's keys and values go to."""
        assert self.cache is not None and self.pages is not None
        size = self.cache.page_size
        return self._host(
            [
                self.pages[span.number][place // size] * size + place % size
                for span in self.spans
                for place in range(span.cached, span.total)
            ]
        )

    @cached_property
    def spans_S4(self) -> Tensor:
        """Of each sequence its rows of the batch (first, last + 1), how many tokens are cached, and its first row."""
        rows = [number for span in self.spans for number in (span.start, span.stop, span.cached, span.start)]
        return self._host(rows).view(-1, 4)

    @cached_property
    def pages_SP(self) -> Tensor | None:
        """The pages of each sequence that hold its tokens so far, in order; filled up with zeros."""
        if self.cache is None or self.pages is None:
            return None
        counts = [-(-span.total // self.cache.page_size) for span in self.spans]
        widest = max(counts, default=0)
        padded = [
            [*self.pages[span.number][:count], *[0] * (widest - count)]
            for span, count in zip(self.spans, counts, strict=True)
        ]
        return self._host([page for pages in padded for page in pages]).view(len(self.spans), widest)

    @cached_property
    def states_S(self) -> Tensor:
        """Where the states of the sequences are."""
        assert self.states is not None
        return self._host(list(self.states))

    @property
    def has_trees(self) -> bool:
        """Whether some sequence's new tokens are a tree."""
        return self.trees is not None and any(tree is not None for tree in self.trees)

    def write(self, tensor: Tensor, new_T: Tensor) -> None:
        """Store one row per new token in a tensor of the cache."""
        movable(tensor).flatten(0, 1).index_copy_(0, self.slots_T, movable(rounded(new_T, tensor.dtype)))

    def read(self, tensor: Tensor, span: Span) -> Tensor:
        """All rows of one sequence so far, oldest first; a view where its pages lie side by side, a copy elsewhere."""
        assert self.cache is not None and self.pages is not None
        count = -(-span.total // self.cache.page_size)
        pages = self.pages[span.number][:count]
        first = pages[0]
        if all(page == first + i for i, page in enumerate(pages)):
            return tensor[first : first + count].flatten(0, 1)[: span.total]
        chosen = movable(tensor)[self._host(list(pages))].view(tensor.dtype)
        return chosen.flatten(0, 1)[: span.total]

    def mask(self, span: Span, window: int | None, chunked: bool = False) -> tuple[Tensor | None, int | None]:
        """What a sequence may look at: a mask (new, total) or None for all, and a window still to be applied."""
        tree_TT = self.trees[span.number] if self.trees is not None else None
        if tree_TT is None:
            return None, window
        keep_TM = torch.ones(span.new, span.total, dtype=torch.bool, device=self.device)
        keep_TM[:, span.cached :] = tree_TT
        if window is not None:  # counted in positions: side by side in a tree, two drafts stand at the same one
            new_T = self.positions_T[span.start : span.stop]
            all_M = torch.cat([torch.arange(span.cached, device=self.device), new_T])
            new_T1 = new_T[:, None]
            keep_TM &= all_M // window == new_T1 // window if chunked else all_M > new_T1 - window
        return keep_TM, None

    def per_sequence(self, *rows_T: Tensor) -> Iterator[tuple[Any, ...]]:
        """Each sequence that has new tokens, with its rows of every tensor given.

        By one split and not by slices: the gradient of a slice is as large as what was sliced.
        """
        lengths = [span.new for span in self.spans]
        for span, *pieces in zip(self.spans, *(x_T.split(lengths) for x_T in rows_T), strict=True):
            if span.new:
                yield span, *pieces

    def _host(self, values: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)
