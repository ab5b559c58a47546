"""The directory of a knowledge base while it is written: new segments, merged ones, and what is left of dead writers.

kb/manifest-3.json    which segments count, see `manifest`
kb/segments/NAME/     see `segment`; named after what it holds, so that a build that was killed finds what it finished
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.atomic import LOCK, exclusive, replacing, sweep_files
from moesaic.errors import UserError
from moesaic.json_files import object_or_empty, read_bytes
from moesaic.know.store import manifest as manifests
from moesaic.know.store import segment as segments
from moesaic.know.store.manifest import Entry, Manifest
from moesaic.know.store.part import Part, Remembers, Segment
from moesaic.know.store.segment import Draft, SegmentReader, StoredDocument

Place = tuple[int, int]  # of a document: the number of its segment, and its number in it

FAN_IN = 8  # segments of like size that are merged into one
SETTINGS = "settings.json"  # in the folder of a part
EXTRACTED = "extracted.jsonl"  # what a model read out of chunks, kept for a build that was killed
EMBEDDED = ".embedded-"  # how the name begins of what holds vectors for a build that was killed
AT_ONCE = 4096  # chunks that are merged at most by a build that adds less: what it costs to add one document is bounded


class Writer:
    """Changes a base; they count together, once `commit` is called. Made by `writing`."""

    def __init__(self, path: Path, before: Manifest) -> None:
        self.path = path
        self.before = before
        self.entries = list(before.segments)
        self.parts: Sequence[Part[Any]] = ()  # set before anything is added
        self.embedder = before.embedder
        self.added = 0  # chunks
        self.lasting = True  # what is written must survive this machine's end
        self._gone: dict[int, set[int]] = {}
        self._readers: dict[str, SegmentReader] = {}

    @property
    def folder(self) -> Path:
        return self.path / "segments"

    def reader(self, entry: Entry) -> SegmentReader:
        if entry.name not in self._readers:
            self._readers[entry.name] = SegmentReader(self.folder / entry.name)
        return self._readers[entry.name]

    def documents(self, number: int) -> Iterator[tuple[Place, StoredDocument]]:
        """Those of a segment that count."""
        reader, deleted = self.reader(self.entries[number]), set(self.entries[number].deleted)
        for place in range(reader.document_count):
            if place not in deleted:
                yield (number, place), reader.document(place)

    def of_file(self, file: str) -> tuple[str, list[Place]]:
        """The digest of a file when it was last read, and its documents that count; none if it is new."""
        found = self._places(lambda reader: reader.of_file(file))
        if not found:
            return "", []
        number, document = found[0]
        return self.reader(self.entries[number]).document(document).digest, found

    def below(self, folder: str) -> list[Place]:
        """The documents that count whose files are below a folder."""
        self._settle()
        return self._places(lambda reader: reader.below(folder))

    def _places(self, find: Callable[[SegmentReader], list[int]]) -> list[Place]:
        found: list[Place] = []
        for number, entry in enumerate(self.entries):
            if places := find(self.reader(entry)):
                deleted = set(entry.deleted)
                found += [(number, place) for place in places if place not in deleted]
        return found

    def delete(self, gone: Sequence[Place]) -> None:
        for number, place in gone:
            self._gone.setdefault(number, set()).add(place)

    def replace(self, gone: Sequence[Place]) -> None:
        """Deletes documents that are added anew with what changed in them."""
        for number, place in gone:
            name, reader = self.entries[number].name, self.reader(self.entries[number])
            document = reader.document(place)
            for part in self.parts:
                if isinstance(part, Remembers) and part.name in self.before.parts:
                    part.remember(self.folder / name / part.name, document.first, reader.draft(document).chunks)
        self.delete(gone)

    def _settle(self) -> None:
        """Enters what was deleted, of all files at once."""
        for number, places in self._gone.items():
            entry = self.entries[number]
            self.entries[number] = replace(entry, deleted=tuple(sorted(places.union(entry.deleted))))
        self._gone.clear()

    def complete(self) -> None:
        """Writes parts that the base did not have so far for the segments that it has."""
        for part in self.parts:
            if part.name not in self.before.parts:
                for entry in self.entries:
                    target = self.folder / entry.name / part.name
                    if object_or_empty(read_bytes(target / SETTINGS)) != part.settings:  # else a killed build wrote it
                        with replacing(target, room=0) as fresh, _part_folder(fresh, part) as folder:
                            part.write(folder, list(self.reader(entry).chunks()))

    def add(self, drafts: Sequence[Draft]) -> None:
        """One new segment."""
        name = self._name(["documents", [[draft.file, draft.digest, draft.id] for draft in drafts]])
        chunks = [chunk for draft in drafts for chunk in draft.chunks]
        target = self.folder / name
        if not target.exists():
            with self._fresh(target) as fresh:
                segments.write(fresh, drafts)
                for part in self.parts:
                    with _part_folder(fresh / part.name, part) as folder:
                        part.write(folder, chunks)
        self.entries.append(Entry(name, len(drafts), len(chunks)))
        self.added += len(chunks)

    @contextmanager
    def _fresh(self, target: Path) -> Iterator[Path]:
        """A folder that takes its place when it is written, and is on disk then, unless it is not to last anyway."""
        if self.lasting:
            with replacing(target, room=0) as fresh:
                yield fresh
        else:
            target.mkdir(parents=True)
            yield target

    def merge(self, everything: bool = False) -> None:
        """Joins small segments, and leaves out what was deleted, at a cost bounded by what this build added."""
        self._settle()
        self.entries = [entry for entry in self.entries if len(entry.deleted) < entry.documents]
        most = 1 << 62 if everything else max(AT_ONCE, self.added)
        while group := _mergeable(self.entries, most, everything):
            self._join(group)

    def commit(self) -> Manifest:
        self._settle()
        parts = {part.name: dict(part.settings) for part in self.parts}
        changed = replace(self.before, parts=parts, segments=tuple(self.entries), embedder=self.embedder)
        if changed != self.before or not self.before.number:
            self.before = replace(changed, number=self.before.number + 1)
            manifests.commit(self.path, self.before)
        return self.before

    def sweep(self) -> None:
        """Removes segments that neither count nor are read, and what killed writers left."""
        named = manifests.sweep(self.path)
        sweep_files(self.path)
        for left in self.path.glob(f"{EMBEDDED}*"):
            left.unlink(missing_ok=True)
        for folder in self.folder.iterdir() if self.folder.exists() else ():
            if folder.name not in named:
                shutil.rmtree(folder, ignore_errors=True)

    def _name(self, content: Any) -> str:
        settings = {part.name: dict(part.settings) for part in self.parts}
        key = json.dumps([content, settings, self.before.chunk_characters], sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        while any(entry.name == name for entry in self.entries):  # the same again, beside what was deleted of it
            name = hashlib.sha256(name.encode()).hexdigest()[:16]
        return name

    def _join(self, group: Sequence[int]) -> None:
        entries = [self.entries[number] for number in group]
        readers = [self.reader(entry) for entry in entries]
        living = [reader.alive(entry.deleted) for reader, entry in zip(readers, entries)]
        drafts = [
            reader.draft(reader.document(number))
            for reader, entry in zip(readers, entries)
            for number in sorted(set(range(entry.documents)).difference(entry.deleted))
        ]
        name = self._name(["merged", [[entry.name, entry.deleted] for entry in entries]])
        if not (self.folder / name).exists():
            with self._fresh(self.folder / name) as fresh:
                segments.write(fresh, drafts)
                for part in self.parts:
                    with _part_folder(fresh / part.name, part) as folder:
                        part.merge(folder, placed(self.folder, entries, living))
        merged = Entry(name, len(drafts), sum(int(alive.sum()) for alive in living))
        rest = [entry for number, entry in enumerate(self.entries) if number not in group]
        self.entries = rest[: group[0]] + [merged] + rest[group[0] :]


@contextmanager
def _part_folder(folder: Path, part: Part[Any]) -> Iterator[Path]:
    """A folder for a part to be written to, which says with what."""
    folder.mkdir(exist_ok=True)
    yield folder
    (folder / SETTINGS).write_text(json.dumps(dict(part.settings)), encoding="utf-8")


def placed(folder: Path, entries: Sequence[Entry], living: Sequence[np.ndarray]) -> list[Segment]:
    """Segments one after the other."""
    firsts = np.cumsum([0, *(entry.chunks for entry in entries)])
    return [Segment(folder / entry.name, int(first), alive) for entry, first, alive in zip(entries, firsts, living)]


def _mergeable(entries: Sequence[Entry], most: int, everything: bool) -> list[int]:
    """Numbers of segments to merge next; none if there is nothing to gain."""
    if everything:
        return list(range(len(entries))) if len(entries) > 1 or any(entry.deleted for entry in entries) else []
    for number, entry in enumerate(entries):
        if 2 * len(entry.deleted) >= entry.documents and entry.chunks <= most:
            return [number]
    tiers: dict[int, list[int]] = {}
    for number, entry in enumerate(entries):
        tiers.setdefault(max(entry.chunks, 1).bit_length() // 3, []).append(number)
    for _, tier in sorted(tiers.items()):
        if len(tier) >= FAN_IN:
            smallest = sorted(tier, key=lambda number: entries[number].chunks)
            sums = itertools.accumulate(entries[number].chunks for number in smallest)
            group = sorted(number for number, total in zip(smallest, sums) if total <= most)
            if len(group) >= FAN_IN // 2:  # fewer would be written again too often
                return group
    return []


@contextmanager
def writing(path: Path, chunk_characters: int) -> Iterator[Writer]:
    """A writer of the base at `path`, which may be new; nobody else writes meanwhile."""
    if path.is_dir() and not manifests.numbers(path):
        others = [left.name for left in path.iterdir() if left.name not in (LOCK, "segments", EXTRACTED)]
        if any(not name.startswith((".manifest-", EMBEDDED)) for name in others):
            raise UserError(path, "holds other things than a knowledge base", "Name another directory.")
    with exclusive(path):
        before = Manifest(chunk_characters=chunk_characters)
        if manifests.numbers(path):
            before, opened = manifests.read(path)
            opened.close()
        writer = Writer(path, before)
        for left in writer.folder.glob(".*") if writer.folder.exists() else ():
            shutil.rmtree(left, ignore_errors=True)
        yield writer
