"""The documents that are never trained on, once through, in their own order: what a loss is measured on.

for batch in held_out_batches(Shards("out/data"), batch_tokens=8192, longest=1024): ...
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moesaic.data.ordering import Stretch
from moesaic.data.packing import Batch, pack
from moesaic.data.shards import Shards
from moesaic.errors import UserError


def held_out_batches(
    data: Shards, *, batch_tokens: int, longest: int, most: int | None = None, source: str | None = None
) -> Iterator[Batch]:
    """Batches of whole documents (longer ones in pieces of `longest`), of about `batch_tokens` tokens.

    `most` is the number of tokens to stop after, taken evenly from all over the data; `source` restricts it to one.
    """
    documents = np.flatnonzero(data.held_out)
    if source is not None:
        documents = documents[data.domain[documents] == data.domains.index(source)]
    if not len(documents):
        problem = "holds no documents apart from training" + (f" of {source}" if source else "")
        raise UserError(data.directory, problem, "Prepare it with a data.held_out above 0.")
    total = int(data.lengths[documents].sum())
    if most is not None and total > most:
        documents = documents[np.linspace(0, len(documents) - 1, max(1, len(documents) * most // total)).astype(int)]
    numbers = np.cumsum(data.lengths[documents]) // batch_tokens
    for chosen in np.split(documents, np.flatnonzero(np.diff(numbers)) + 1):
        stretch = Stretch(data.starts[chosen], data.lengths[chosen], data.domain[chosen])
        yield pack(data, [stretch], longest, {})
