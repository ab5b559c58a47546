"""Which indexes a knowledge base has: words always, vectors where it has an embedding model, a graph where it is asked.

What a base was built with is in its manifest, and what is added to it later is made the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moesaic.errors import UserError
from moesaic.know.chunk import Chunk
from moesaic.know.graph.part import GraphPart
from moesaic.know.graph.patterns import PatternExtractor
from moesaic.know.graph.triple import Extraction, Extractor
from moesaic.know.search.embedded import Embedded, QueryEmbeds
from moesaic.know.search.words import WordsPart
from moesaic.know.store.manifest import Manifest
from moesaic.know.store.part import Part
from moesaic.serve.api.fingerprint import weights_fingerprint

if TYPE_CHECKING:
    from moesaic.know.search.vectors import VectorPart

BITS = 8  # of an embedding model's matrices, unless asked: it finds what 32 find in half the time
Report = Callable[[str, int, int], None]  # what is done, how much of it so far, and of how much


@dataclass(frozen=True)
class Asked:
    """What the caller of a build wants indexed; None is as the base has it, or for a new one, words and patterns."""

    embed: Path | None = None  # directory of an embedding model
    bits: int | None = None  # of its matrices, 8 or 32; None: as the base has it, or for a new one, BITS
    embedder: QueryEmbeds | None = None  # one that is open, in its place
    extract: str | None = None  # patterns, model or none
    extractor: Extractor | None = None  # with extract model

    def parts(
        self, path: Path, before: Manifest, report: Report | None = None
    ) -> tuple[list[Part[Any]], dict[str, Any]]:
        """The parts of the base at `path`, and the embedding model as the manifest records it."""
        embedder, record = self._embedder(path, before)
        parts: list[Part[Any]] = [WordsPart()]
        if embedder is not None:
            model = f"{record['fingerprint']} {record.get('bits')}" if record else ""
            parts.append(vector_part(Embedded(embedder, path, model) if record else embedder, report))
        extractor = self._extractor(path, before)
        if extractor is not None:
            parts.append(GraphPart(extractor))
        for part in parts:
            if part.name in before.parts and before.parts[part.name] != dict(part.settings):
                problem = (
                    f"its {part.name} were written with {_said(before.parts[part.name])}, not {_said(part.settings)}"
                )
                raise UserError(path, problem, "Build another base, in another directory.")
        return parts, record

    def _embedder(self, path: Path, before: Manifest) -> tuple[QueryEmbeds | None, dict[str, Any]]:
        if self.embedder is not None:
            return self.embedder, {}
        if self.embed is None:
            if self.bits is not None:
                raise UserError("--embed-bits", "needs an embedding model", "Name it: --embed DIR")
            return recorded_embedder(before), before.embedder
        record: dict[str, Any] = {"path": str(self.embed.resolve()), "fingerprint": weights_fingerprint(self.embed)}
        bits_before = before.embedder.get("bits", 32) if before.embedder else self.bits or BITS
        record |= {"bits": bits_before} if bits_before != 32 else {}
        if before.embedder and record["fingerprint"] != before.embedder["fingerprint"]:
            problem = f"was built with the embedding model of {before.embedder['path']}, and {self.embed} is another"
            raise UserError(path, problem, "Leave --embed out, or build another base, in another directory.")
        if self.bits not in (None, bits_before):
            problem = f"its vectors are of {bits_before} bits, not {self.bits}"
            raise UserError(path, problem, "Leave --embed-bits out, or build another base, in another directory.")
        opened = recorded_embedder(before, record) if before.embedder else _opened(self.embed, bits_before)
        return opened, record

    def _extractor(self, path: Path, before: Manifest) -> Extractor | None:
        recorded = before.parts.get("graph")
        if self.extract == "model":
            if self.extractor is None:
                raise UserError("--extract model", "needs a model that reads the chunks", "Name one with --model.")
            return self.extractor
        if self.extract == "none" or (self.extract is None and recorded is None and before.number):
            if recorded is not None:
                raise UserError(path, "has a graph", "Leave --extract none out, or build another base.")
            return None
        patterns = PatternExtractor()
        if self.extract == "patterns" or recorded in (None, dict(patterns.settings)):
            return patterns
        return _RecordedExtractor(recorded or {})


AS_BEFORE = Asked()


def recorded_embedder(manifest: Manifest, record: Mapping[str, Any] | None = None) -> QueryEmbeds | None:
    """The one that a base was built with, which is loaded when something is first embedded."""
    settings, record = manifest.parts.get("vectors"), record or manifest.embedder
    if settings is None or not record:
        return None
    name, dimensions, bits = settings["model"], settings["dimensions"], record.get("bits", 32)
    return _RecordedEmbedder(name, dimensions, Path(record["path"]), record["fingerprint"], bits)


@dataclass(frozen=True)
class _RecordedEmbedder:
    name: str
    dimensions: int
    path: Path
    fingerprint: str
    bits: int

    @cached_property
    def _passages(self) -> QueryEmbeds:
        return self._open(self.bits)

    @cached_property
    def _queries(self) -> QueryEmbeds:
        """In full: a query's rounding would shift all its scores, a passage's but one of them."""
        return self._open(32)

    def _open(self, bits: int) -> QueryEmbeds:
        if weights_fingerprint(self.path) != self.fingerprint:
            what = "has changed since" if self.path.exists() else "is gone"
            problem = f"the embedding model that this base was built with {what}"
            raise UserError(self.path, problem, "Name the same one, wherever it is: moesaic know build … --embed DIR")
        return _opened(self.path, bits)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return self._passages.embed(texts)

    def embed_query(self, text: str) -> np.ndarray:
        return self._queries.embed_query(text)


@dataclass(frozen=True)
class _RecordedExtractor:
    settings: Mapping[str, Any]

    def extract(self, chunks: Sequence[Chunk]) -> list[Extraction]:
        problem = f"this base's graph was read by {_said(self.settings)}"
        raise UserError("--extract", problem, "Name it again: --extract model --model DIR")


def vector_part(embedder: QueryEmbeds, report: Report | None = None) -> VectorPart:
    """Here and below, what brings all of PyTorch is imported when it is needed: a base of words needs none."""
    from moesaic.know.search.vectors import VectorPart

    return VectorPart(embedder, report)


def _opened(path: Path, bits: int) -> QueryEmbeds:
    from moesaic.know.embed import Embedder

    return Embedder.open(path, bits=bits)


def _said(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items()) or "other settings"
