"""Documents examined on a Ray cluster, by Ray Data: `moesaic prepare RECIPE --out DIR --engine ray`.

A source is cut into pieces, some files or some tasks each. Workers read a piece and hash, score and tokenize its
documents; Ray Data brings what they found back in the order of the source, as much of it at a time as memory holds.
What is a copy, and what is written where, is decided here, document by document, so the result is that of one process.
Every machine must see the sources under the same paths.
"""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow

from moesaic.data.preparation.examination import Examination, Examinee
from moesaic.data.records import BrokenRecord, Document, ReadPosition, Record
from moesaic.data.sources import Corpus
from moesaic.errors import UserError

Piece = tuple[ReadPosition, ReadPosition]  # from where up to where
GROUP_RECORDS, GROUP_CHARACTERS = 512, 1 << 21  # of what comes back together, at most


class RayExaminer:
    """`address` is a running cluster's, or `auto`; by default one is started on this machine, and ended."""

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
            import ray.data
        except ImportError as error:
            remedy = "Install moesaic[cluster], or leave --engine ray out."
            raise UserError("--engine ray", f"needs Ray with Ray Data ({error.name or error})", remedy) from None
        self.ray, self.address = ray, address

    @contextmanager
    def cluster(self) -> Iterator[RayExaminer]:
        """Connected to it; what was connected before stays so."""
        own = not self.ray.is_initialized()
        if own:
            options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
            options |= {"address": self.address} if self.address else {"address": "local", "include_dashboard": False}
            try:
                self.ray.init(**options)
            except ConnectionError as error:
                problem = f"no Ray cluster answers there ({' '.join(str(error).split())[:200]})"
                raise UserError(f"--address {self.address}", problem, "Start one: ray start --head.") from None
        logger = logging.getLogger("ray.data")
        before = logger.level
        logger.setLevel(logging.ERROR)  # a line for each source, in the middle of the progress bar
        try:
            yield self
        finally:
            logger.setLevel(before)
            if own:
                self.ray.shutdown()

    def examine(self, corpus: Corpus, start: ReadPosition, examination: Examination) -> Iterator[Sequence[Examinee]]:
        pieces = [{"piece": [astuple(end) for end in piece]} for piece in pieces_of(corpus, start)]
        if not pieces:
            return
        data = self.ray.data.from_items(pieces, override_num_blocks=len(pieces))
        data.context.execution_options.preserve_order = True
        data.context.enable_progress_bars = False
        work = _Work(corpus, examination, str(Path.cwd()))
        found = data.map_batches(work, batch_size=1, batch_format="numpy", zero_copy_batch=False)
        for row in found.iter_rows():
            yield pickle.loads(row["group"])


class _Work:
    """Of a worker: a piece of the source, group by group."""

    def __init__(self, corpus: Corpus, examination: Examination, folder: str) -> None:
        self.corpus, self.examination, self.folder = corpus, examination, folder

    def __call__(self, batch: dict[str, Any]) -> Iterator[pyarrow.Table]:
        if os.path.isdir(self.folder):
            os.chdir(self.folder)  # what paths are relative to
        for ends in batch["piece"]:
            first, last = (ReadPosition(*map(int, end)) for end in ends)
            for group in examined(self.corpus, (first, last), self.examination):
                yield pyarrow.table({"group": pyarrow.array([pickle.dumps(group)], pyarrow.large_binary())})


def pieces_of(corpus: Corpus, start: ReadPosition) -> Iterator[Piece]:
    """What of a source is read by one worker after the other."""
    return pairwise(corpus.cuts(start))


def examined(corpus: Corpus, piece: Piece, examination: Examination) -> Iterator[list[Examinee]]:
    for some in _groups(corpus.records(*piece)):
        done = iter(examination([record for record in some if isinstance(record, Document)]))
        yield [record if isinstance(record, BrokenRecord) else next(done) for record in some]


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    some: list[Record] = []
    characters = 0
    for record in records:
        some.append(record)
        characters += len(record.text) if isinstance(record, Document) else 0
        if len(some) >= GROUP_RECORDS or characters >= GROUP_CHARACTERS:
            yield some
            some, characters = [], 0
    if some:
        yield some
