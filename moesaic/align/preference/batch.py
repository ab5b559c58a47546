"""Answers that belong together as batches: packed without padding, and never parted when a batch is taken in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moesaic.align.examples import Mixture, Shuffled
from moesaic.align.preference.pairs import Pair
from moesaic.align.sft import pack_said
from moesaic.data.packing import Batch, GroupedBatch


def pack_pairs(
    pairs: Sequence[Pair],
    position: dict[str, Any],
    reference_P2: Tensor | None = None,
    notes: dict[str, float] | None = None,
) -> GroupedBatch:
    """Chosen and rejected in turn. What is said of a sequence as a whole stands at each of its tokens."""
    plain = pack_said([side for pair in pairs for side in pair.sides], position)
    lengths = torch.tensor(plain.lengths)
    of_sequence = {
        "margin": torch.tensor([pair.margin for pair in pairs]).repeat_interleave(2),
        "pair_weight": torch.tensor([pair.weight for pair in pairs]).repeat_interleave(2),
    }
    if reference_P2 is not None:
        of_sequence["reference"] = reference_P2[[pair.number for pair in pairs]].reshape(-1)
    columns = {name: values_S.repeat_interleave(lengths) for name, values_S in of_sequence.items()}
    return GroupedBatch(
        plain.tokens_T,
        plain.targets_T,
        plain.lengths,
        plain.domains,
        len(pairs),
        position,
        columns,
        notes or {},
        groups=[2] * len(pairs),
    )


class GroupStream:
    """`size` items of weighted sources in turn, packed by `pack`; its position is how many were taken of each. Where
    numbers are `known`, items of others are passed over: a run that was rewound comes to some it was not to see."""

    def __init__(
        self,
        sources: Sequence[Shuffled[Any]],
        weights: Sequence[float],
        size: int,
        pack: Callable[[list[Any], dict[str, Any]], Batch],
        known: frozenset[int] | None = None,
    ) -> None:
        self.sources, self.weights, self.size, self.pack, self.known = sources, weights, size, pack, known
        self.order = Mixture(cast(Any, sources), weights)

    @property
    def position(self) -> dict[str, Any]:
        return {"taken": list(self.order.taken)}

    def from_position(self, position: Mapping[str, Any] | None) -> GroupStream:
        stream = GroupStream(self.sources, self.weights, self.size, self.pack, self.known)
        if position is not None:
            stream.order = stream.order.at(position["taken"])
        return stream

    def skip(self, past: int | Mapping[str, Any]) -> GroupStream:
        assert isinstance(past, Mapping)
        return self.from_position(past)

    def coming(self, batches: int) -> Iterator[Any]:
        """What the first batches of the stream hold, from its beginning."""
        order = self.order.at([0] * len(self.sources))
        for _ in range(batches * self.size):
            yield next(order)

    def __next__(self) -> Batch:
        items: list[Any] = []
        while len(items) < self.size:
            item = cast(Any, next(self.order))
            if self.known is None or item.number in self.known:
                items.append(item)
        return self.pack(items, self.position)
