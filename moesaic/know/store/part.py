"""One index of a knowledge base: written once per segment, read over all segments together.

A row is a chunk's number in the whole base: that of its segment's first chunk plus its number there. Rows of deleted
documents stay until segments are merged, and are not alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from moesaic.know.chunk import Chunk

Opened = TypeVar("Opened", covariant=True)


@dataclass(frozen=True)
class Segment:
    folder: Path
    first: int  # row of its first chunk
    alive: np.ndarray  # of bool, one per chunk


class Part(Protocol[Opened]):
    @property
    def name(self) -> str:
        """Of its folder in a segment."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """What its files depend on besides the chunks, as JSON: all segments of a base are written with the same."""
        ...

    def write(self, folder: Path, chunks: Sequence[Chunk]) -> None:
        """Writes this part of a new segment into `folder`, which exists and is empty."""
        ...

    def merge(self, folder: Path, segments: Sequence[Segment]) -> None:
        """Writes what `write` would have written for the living chunks of `segments`, in their order, from what those
        hold already (`segment.folder / self.name`): merging costs no model. `folder` exists and is empty."""
        ...

    def open(self, segments: Sequence[Segment]) -> Opened:
        """What is searched. `segment.folder / self.name` is what `write` wrote."""
        ...


@runtime_checkable
class Remembers(Protocol):
    """A part that is dear to make, and uses again what it made of chunks that stay when their document changes."""

    def remember(self, folder: Path, first: int, chunks: Sequence[Chunk]) -> None:
        """Chunks of a segment, from number `first` on, whose document is written anew; `folder` is this part's."""
        ...
