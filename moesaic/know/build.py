"""Build a knowledge base from files, or bring one up to date: what did not change costs a hash.

built = build([Path("docs")], Path("kb"))
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moesaic.errors import UserError
from moesaic.know.documents.chunking import TARGET, chunks_of
from moesaic.know.documents.document import Document, Raw, Skipped, Unreadable
from moesaic.know.documents.formats import read_documents
from moesaic.know.documents.sources import SourceFile, files_below, read_file
from moesaic.know.parts import AS_BEFORE, Asked
from moesaic.know.store import manifest as manifests
from moesaic.know.store.directory import Place, Writer, writing
from moesaic.know.store.segment import Draft

Progress = Callable[[str, int, int], None]
SEGMENT_CHARACTERS = 16 * 2**20  # of text, after which a segment is written: memory stays bounded


@dataclass
class Built:
    """What a build did. Files, but for the last two."""

    added: int = 0
    changed: int = 0
    unchanged: int = 0
    removed: int = 0
    skipped: list[Skipped] = field(default_factory=list)
    documents: int = 0  # that the base now holds
    chunks: int = 0


def build(
    paths: Sequence[Path],
    out: Path,
    *,
    asked: Asked = AS_BEFORE,
    keep: bool = False,
    compact: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Built:
    """Index the files below `paths`. Those of an earlier build that are gone from there are removed, unless `keep`."""
    files, skipped = files_below(paths, but=out)
    built = Built(skipped=skipped)
    with writing(out, TARGET) as writer:
        writer.parts, writer.embedder = asked.parts(out, writer.before, progress)
        writer.complete()
        for batch in _batches(_drafts(files, writer, built, progress)):
            writer.add(batch)
        if not keep:
            built.removed += _remove_gone(writer, {str(file.path) for file in files}, paths)
        _finish(writer, built, compact)
    return built


def remove(base: Path, sources: Sequence[str], *, compact: bool = False) -> Built:
    """Remove documents by their source, or all below one; they are gone from the next search on."""
    built = Built()
    if not manifests.numbers(base):
        manifests.read(base)  # which says so
    with writing(base, TARGET) as writer:
        writer.parts, _ = AS_BEFORE.parts(base, writer.before)
        for source in sources:
            gone = [
                place
                for segment in range(len(writer.entries))
                for place, document in writer.documents(segment)
                if document.source == source or document.source.startswith((f"{source.rstrip('/')}/", f"{source}#"))
            ]
            if not gone:
                raise UserError(source, f"{base} has no such document", f"See them: moesaic know show {base}")
            writer.delete(gone)
            built.removed += len(gone)
        _finish(writer, built, compact)
    return built


def index(documents: Iterable[Document], out: Path, asked: Asked) -> None:
    """A new base of documents that are no files, which is not to last."""
    with writing(out, TARGET) as writer:
        writer.lasting = False
        writer.parts, writer.embedder = asked.parts(out, writer.before)
        for batch in _batches(
            Draft(
                document.id, document.source, document.title, f"text:{number}", document.id, len(document.text),
                document.text, chunks_of(document),
            )
            for number, document in enumerate(documents)
        ):  # fmt: skip
            writer.add(batch)
        writer.commit()


def _drafts(files: Sequence[SourceFile], writer: Writer, built: Built, progress: Progress) -> Iterator[Draft]:
    for done, file in enumerate(files):
        progress("reading", done, len(files))
        before, known = writer.of_file(str(file.path))
        raw, digest, documents = Raw(b"", file.source, built.skipped), "", []
        try:
            raw = replace(raw, bytes=read_file(file))
            digest = hashlib.sha256(raw.bytes).hexdigest()
            if known and before == digest:
                built.unchanged += 1
                continue
            documents = read_documents(raw)
        except Unreadable as why:
            built.skipped.append(why.of(raw))
        if known and documents:
            writer.replace(known)
            built.changed += 1
        elif known:
            writer.delete(known)
            built.removed += 1
        elif documents:
            built.added += 1
        for document in documents:
            yield Draft(
                document.id, document.source, document.title, str(file.path), digest, len(raw.bytes),
                document.text, chunks_of(document),
            )  # fmt: skip


def _batches(drafts: Iterable[Draft]) -> Iterator[list[Draft]]:
    batch: list[Draft] = []
    characters = 0
    for draft in drafts:
        batch.append(draft)
        characters += len(draft.text)
        if characters >= SEGMENT_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _remove_gone(writer: Writer, there: set[str], paths: Sequence[Path]) -> int:
    """What came from below `paths` and is no longer there. Counts files."""
    gone: dict[str, list[Place]] = {}
    for path in paths:
        for number, place in writer.below(os.path.realpath(path)) if path.is_dir() else ():
            file = writer.reader(writer.entries[number]).document(place).file
            if file not in there:
                gone.setdefault(file, []).append((number, place))
    for places in gone.values():
        writer.delete(places)
    return len(gone)


def _finish(writer: Writer, built: Built, compact: bool) -> None:
    writer.merge(everything=compact)
    after = writer.commit()
    writer.sweep()
    built.documents = sum(entry.documents - len(entry.deleted) for entry in after.segments)
    built.chunks = sum(
        int(writer.reader(entry).alive(entry.deleted).sum()) if entry.deleted else entry.chunks
        for entry in after.segments
    )
