"""A document as every reader gives it: its text, and what is known about places in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Heading:
    start: int  # of its line in the text
    end: int
    level: int  # 1 is the outermost
    title: str


@dataclass(frozen=True)
class Document:
    source: str  # what a reader knows it by
    title: str
    text: str
    headings: tuple[Heading, ...] = ()
    pages: tuple[int, ...] = ()  # where each page of a PDF begins in the text

    @cached_property
    def id(self) -> str:
        return hashlib.sha256(f"{self.source}\0{self.title}\0{self.text}".encode("utf-8", "replace")).hexdigest()[:16]


@dataclass(frozen=True)
class Skipped:
    """A file that was left out, or something in one: where, and why."""

    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.source}: {self.why}"


@dataclass(frozen=True)
class Raw:
    """A file as it was found. What a reader leaves out of it, it adds to `skipped`."""

    bytes: bytes
    source: str
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Without folders and ending."""
        return PurePosixPath(self.source).stem

    def skip(self, what: str, why: str) -> None:
        self.skipped.append(Skipped(f"{self.source}{what}", why))


class Unreadable(Exception):
    """Why a file is skipped."""

    def of(self, raw: Raw) -> Skipped:
        return Skipped(raw.source, str(self))
