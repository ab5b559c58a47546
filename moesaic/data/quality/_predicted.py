"""What a model says of the tokens of documents, many of them in one flat forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.data.records import Document
from moesaic.errors import UserError

if TYPE_CHECKING:
    from moesaic.model.transformer import Model

CHARACTERS = 16  # of a token at most, as far as deciding how much text to tokenise goes


def logprobs(model: Model, path: str, documents: Sequence[Document], limit: int, batch_tokens: int) -> Iterator[Tensor]:
    """For each document log p of its first `limit` tokens but the first, in the model's own tokens."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UserError(path, "the model has no tokenizer", "A score of texts needs one that has.")
    texts = [document.text[: limit * CHARACTERS] for document in documents]
    sequences = [tokenizer.encode(text)[:limit] for text in texts]
    batch: list[list[int]] = []
    for number, sequence in enumerate(sequences):
        batch.append(sequence or [0])
        room = batch_tokens - sum(map(len, batch))
        if number == len(sequences) - 1 or len(sequences[number + 1]) > room:
            yield from model.logprobs(batch)
            batch = []
