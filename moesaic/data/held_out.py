"""Batches of held-out documents, once through, in their own order: what the validation loss is measured on.

for batch in held_out_batches(Shards("out/data"), batch_tokens=8192, sequence_length=1024): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moesaic.data.ordering import Table, TokenSpans, cut
from moesaic.data.packing import Batch, pack
from moesaic.data.shards import Shards
from moesaic.errors import UserError


def held_out_batches(
    data: Shards, *, batch_tokens: int, sequence_length: int, max_tokens: int | None = None, source: str | None = None
) -> Iterator[Batch]:
    """Batches of documents, longer ones in pieces of `sequence_length`, of about `batch_tokens` tokens.

    `max_tokens` limits their number, sampled evenly from all over the data; `source` restricts it to one.
    """
    of, mine = "", np.ones(data.documents, bool)
    if source is not None:
        if source not in data.domains:
            raise UserError(data.directory, f"was prepared without {source}", "Prepare the data again.")
        of, mine = f" of {source}", data.domain == data.domains.index(source)
    documents = np.flatnonzero(data.held_out & mine)
    if not len(documents):
        problem = f"none of the {int(mine.sum()):,} documents{of} is held out from training, to evaluate on"
        raise UserError(data.directory, problem, "Prepare it again with a larger data.held_out, or more documents.")
    # Pieces are sampled, not documents: one of them may be a book.
    pieces, _ = cut(Table(data.starts[documents], data.lengths[documents], data.domain[documents]), sequence_length)
    count, total = len(pieces.lengths), int(pieces.lengths.sum())
    chosen = np.arange(count)
    if max_tokens is not None and total > max_tokens:
        chosen = np.linspace(0, count - 1, max(1, count * max_tokens // total)).astype(int)
    numbers = np.cumsum(pieces.lengths[chosen]) // batch_tokens
    for these in np.split(chosen, np.flatnonzero(np.diff(numbers)) + 1):
        span = TokenSpans(pieces.starts[these], pieces.lengths[these], pieces.domain[these])
        yield pack(data, [span], sequence_length, {})
