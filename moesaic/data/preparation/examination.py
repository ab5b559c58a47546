"""What a preparation does with a document whatever came before it: hashes, scores, tokens, whether it is held out.

One process does it for the documents it keeps. Workers on a cluster do it for all of theirs, because only the process
that has seen everything before knows what is a copy; it is then told apart by the hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from moesaic.data.dedupe import Keys, keys_of
from moesaic.data.quality import QualityScore
from moesaic.data.record_rows import Placed
from moesaic.data.records import BrokenRecord, Document, ReadPosition
from moesaic.data.shards import token_type
from moesaic.data.sources import Corpus
from moesaic.data.tokenizer_training import end_of_document
from moesaic.model.tokenizer import Tokenizer
from moesaic.recipe_sections import DedupeSection


@dataclass(frozen=True, slots=True)
class Examined:
    """A document, ready to be written if it is new."""

    after: ReadPosition
    characters: int  # 0: nothing but white space
    keys: Keys | None
    tokens: Sequence[int] | np.ndarray
    held_out: bool
    columns: Mapping[str, float]
    rows: Sequence[Placed] = ()


Examinee = Examined | BrokenRecord


class Examiner(Protocol):
    """Who examines the documents of a source in place of this process, in their order, some at a time."""

    def examine(
        self, corpus: Corpus, start: ReadPosition, examination: Examination
    ) -> Iterator[Sequence[Examinee]]: ...


@dataclass(frozen=True)
class Examination:
    """Can be sent elsewhere. `columns` are those of the shards, scores included."""

    files: Mapping[str, bytes]  # of the tokenizer
    dedupe: DedupeSection
    scorers: Mapping[str, QualityScore]
    columns: Sequence[str]
    held_out: float

    def __call__(self, documents: Sequence[Document]) -> list[Examined]:
        full = [document for document in documents if document.text.strip()]
        scores = {name: scorer.score(full) for name, scorer in self.scorers.items()}
        tokenizer = _tokenizer(tuple(self.files.items()))
        texts = encoded(tokenizer, full)
        kind = token_type(len(tokenizer))
        found, at = [], 0
        for document in documents:
            if not document.text.strip():
                found.append(Examined(document.after, 0, None, np.empty(0, kind), False, {}))
                continue
            keys = keys_of(document.identity, self.dedupe)
            values = column_values(document, self.columns, {name: score[at] for name, score in scores.items()})
            held_out = is_held_out(document.identity, self.held_out)
            tokens, rows = next(texts)
            own = np.asarray(tokens, kind)
            found.append(Examined(document.after, len(document.text), keys, own, held_out, values, rows))
            at += 1
        return found


@lru_cache(maxsize=1)
def _tokenizer(files: tuple[tuple[str, bytes], ...]) -> Tokenizer:
    made = Tokenizer.from_files(dict(files), Path("tokenizer"))
    assert made is not None
    return made


def encoded(tokenizer: Tokenizer, documents: Sequence[Document]) -> Iterator[tuple[list[int], list[Placed]]]:
    """Tokens of each, its end included, and which of them rows stand in place of. A special token written out in a text
    stays text, so that no document can end itself or pose as the user."""
    tokenizer.fast.encode_special_tokens = True
    end = end_of_document(tokenizer)
    pieces = [piece for document in documents for piece in document.pieces]
    encodings = iter(tokenizer.fast.encode_batch_fast(pieces, add_special_tokens=False))
    for document in documents:
        tokens, rows = list(next(encodings).ids), []
        for file in document.rows.files if document.rows is not None else ():
            rows.append(Placed(file.path, file.rows, len(tokens)))
            tokens += [end] * file.rows  # read by nobody
            tokens += next(encodings).ids
        yield [*tokens, end], rows


def column_values(document: Document, columns: Sequence[str], scores: Mapping[str, float]) -> dict[str, float]:
    return {name: document.fields.get(name, float("nan")) for name in columns} | dict(scores)


def is_held_out(text: str, share: float) -> bool:
    # By the text itself, so that copies of a document end on the same side.
    digest = hashlib.blake2b(text.encode(), digest_size=4, person=b"held out").digest()
    return int.from_bytes(digest, "big") < share * 2**32
