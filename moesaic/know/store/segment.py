"""One segment of a knowledge base: documents, their texts and chunks, and a folder for each part. Written once.

documents.jsonl  what each document is and which file it came from, in one line; documents.npy says where each begins
files.utf8       names of those files, sorted, with the numbers of their documents in files.npy
text.utf8        the texts, one after the other
chunks.npy       a row of numbers for each chunk
headings.json    the headings above chunks, each list once

All of it is read where it lies: to find one document among many costs no more than among few.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from moesaic.errors import UserError
from moesaic.know.chunk import Chunk
from moesaic.know.store import sorted_strings
from moesaic.know.store.sorted_strings import SortedStrings, mapped

_COLUMNS = ("document", "begin", "stop", "start", "end", "page", "headings")  # begin and stop are of bytes in text.utf8


@dataclass(frozen=True)
class StoredDocument:
    id: str
    source: str
    title: str
    file: str  # where it was read, which is its place in the base: a newer one takes it
    digest: str  # of the file
    bytes: int  # of the file
    begin: int  # of its text in text.utf8
    stop: int
    first: int  # number of its first chunk
    chunks: int


@dataclass(frozen=True)
class Draft:
    """A document that is to be stored."""

    id: str
    source: str
    title: str
    file: str
    digest: str
    bytes: int
    text: str
    chunks: Sequence[Chunk]


def write(folder: Path, drafts: Sequence[Draft]) -> None:
    documents: list[StoredDocument] = []
    headings: dict[tuple[str, ...], int] = {}
    lines: list[tuple[int, ...]] = []
    position = 0
    with (folder / "text.utf8").open("wb") as texts:
        for number, draft in enumerate(drafts):
            raw = draft.text.encode()
            stored = StoredDocument(
                draft.id, draft.source, draft.title, draft.file, draft.digest, draft.bytes,
                position, position + len(raw), len(lines), len(draft.chunks),
            )  # fmt: skip
            documents.append(stored)
            place, character = position, 0
            for chunk in draft.chunks:
                place += (
                    chunk.start - character
                    if len(raw) == len(draft.text)
                    else len(draft.text[character : chunk.start].encode())
                )
                character, begin = chunk.end, place
                place += len(chunk.text.encode())
                above = headings.setdefault(chunk.headings, len(headings))
                lines.append((number, begin, place, chunk.start, chunk.end, chunk.page or 0, above))
            texts.write(raw)
            position += len(raw)
    np.save(folder / "chunks.npy", np.array(lines, np.int64).reshape(-1, len(_COLUMNS)))
    (folder / "headings.json").write_text(json.dumps(list(headings)), encoding="utf-8")
    _write_documents(folder, documents)


def _write_documents(folder: Path, documents: Sequence[StoredDocument]) -> None:
    lines = [json.dumps(vars(document)).encode() + b"\n" for document in documents]
    (folder / "documents.jsonl").write_bytes(b"".join(lines))
    begins = np.cumsum([0, *map(len, lines)])
    firsts = [document.first for document in documents] + [sum(document.chunks for document in documents)]
    np.save(folder / "documents.npy", np.array([begins, firsts], np.int64).T)
    files = [document.file.encode("utf-8", "surrogateescape") for document in documents]
    order = sorted(range(len(files)), key=files.__getitem__)
    sorted_strings.write(folder, "files", [files[number] for number in order])
    np.save(folder / "files.npy", np.array(order, np.int64))


class SegmentReader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _documents(self) -> np.ndarray:
        """Where the line of each begins, and the number of its first chunk; and where the last ones end."""
        return self._array("documents")

    @cached_property
    def _lines(self) -> mmap.mmap | bytes:
        return mapped(self.folder / "documents.jsonl")

    @cached_property
    def _files(self) -> SortedStrings:
        return SortedStrings(self.folder, "files")

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Of the documents, in the order of their files."""
        return self._array("files")

    def _array(self, name: str) -> np.ndarray:
        try:
            loaded: np.ndarray = np.load(self.folder / f"{name}.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            remedy = "Build the base again, in another directory."
            raise UserError(self.folder, f"is damaged: {name}.npy cannot be read ({error})", remedy) from None
        return np.asarray(loaded)  # a plain array is indexed faster

    @property
    def document_count(self) -> int:
        return len(self._documents) - 1

    def document(self, number: int) -> StoredDocument:
        begin, end = self._documents[number : number + 2, 0].tolist()
        return StoredDocument(**json.loads(self._lines[begin:end]))

    def documents(self) -> Iterator[StoredDocument]:
        return map(self.document, range(self.document_count))

    def of_file(self, file: str) -> list[int]:
        """Numbers of the documents that came from a file."""
        name = file.encode("utf-8", "surrogateescape")
        first = last = self._files.first_from(name)
        while last < len(self._files) and self._files[last] == name:
            last += 1
        return sorted(self._numbers[first:last].tolist())

    def below(self, folder: str) -> list[int]:
        """Numbers of the documents whose files are below a folder."""
        start = folder.rstrip("/").encode("utf-8", "surrogateescape")
        return self._between(start + b"/", start + b"0")  # which follows the slash

    def _between(self, first: bytes, last: bytes) -> list[int]:
        found: list[int] = self._numbers[self._files.first_from(first) : self._files.first_from(last)].tolist()
        return sorted(found)

    @cached_property
    def _headings(self) -> list[tuple[str, ...]]:
        return [tuple(titles) for titles in json.loads((self.folder / "headings.json").read_bytes())]

    @cached_property
    def _chunks(self) -> np.ndarray:
        return self._array("chunks")

    @cached_property
    def _text(self) -> mmap.mmap | bytes:
        return mapped(self.folder / "text.utf8")

    def __len__(self) -> int:
        return len(self._chunks)

    def text(self, document: StoredDocument) -> str:
        return self._text[document.begin : document.stop].decode()

    def chunk(self, number: int) -> Chunk:
        document, begin, stop, start, end, page, above = self._chunks[number].tolist()
        stored = self.document(document)
        text = self._text[begin:stop].decode()
        title, headings = stored.title, self._headings[above]
        return Chunk(
            f"{stored.id}-{start:x}", stored.id, stored.source, title, text, start, end, headings, page or None
        )

    def draft(self, document: StoredDocument) -> Draft:
        """The document as it was stored."""
        chunks = [self.chunk(number) for number in range(document.first, document.first + document.chunks)]
        return Draft(
            document.id, document.source, document.title, document.file, document.digest, document.bytes,
            self.text(document), chunks,
        )  # fmt: skip

    def chunks(self) -> Iterator[Chunk]:
        return map(self.chunk, range(len(self)))

    def alive(self, deleted: Sequence[int]) -> np.ndarray:
        """Of each chunk, whether its document counts."""
        alive = np.ones(len(self), bool)
        for number in deleted:
            first, last = self._documents[number : number + 2, 1].tolist()
            alive[first:last] = False
        return alive
