"""Which reader reads which file, by the ending of its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePosixPath

from moesaic.know.documents import archives, markdown, plain, records
from moesaic.know.documents.bounded import Bounded
from moesaic.know.documents.document import Document, Raw, Unreadable

Reader = Callable[[Raw], list[Document]]

READERS: dict[str, Reader] = {
    **dict.fromkeys(("", ".txt", ".text", ".log", ".py"), plain.read),
    **dict.fromkeys((".md", ".markdown"), markdown.read),
    ".rst": markdown.read_rst,
    **dict.fromkeys((".html", ".htm", ".xhtml"), Bounded("html", "trafilatura")),
    ".pdf": Bounded("pdf", "pypdf"),
    ".json": records.read,
    ".jsonl": records.read_lines,
}
ARCHIVES: dict[str, archives.Opener] = {
    ".zip": archives.zip_members,
    **dict.fromkeys((".tar", ".tgz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz"), archives.tar_members),
}


def read_documents(raw: Raw) -> list[Document]:
    """The documents in a file; raises Unreadable with the reason where there are none to be had."""
    opener = ARCHIVES.get(_ending(raw.source))
    if opener is None:
        return _read_one(raw)
    found = []
    for member in opener(raw):
        try:
            found += _read_one(member)
        except Unreadable as why:
            raw.skipped.append(why.of(member))
        raw.skipped.extend(member.skipped)
    if not found:
        raise Unreadable("holds no document that can be read")
    return found


def _read_one(raw: Raw) -> list[Document]:
    ending = _ending(raw.source)
    if ending in ARCHIVES:
        raise Unreadable("is an archive in an archive")
    reader = READERS.get(ending)
    if reader is None:
        raise Unreadable(f"there is no reader for {ending}")
    if not raw.bytes.strip():
        raise Unreadable("is empty")
    try:
        found = [document for document in reader(raw) if document.text.strip()]
    except RecursionError:
        raise Unreadable("is nested too deep") from None
    if not found:
        raise Unreadable("holds no text")
    return found


def _ending(source: str) -> str:
    suffixes = [suffix.lower() for suffix in PurePosixPath(source).suffixes]
    both = "".join(suffixes[-2:])
    return both if both in ARCHIVES else suffixes[-1] if suffixes else ""
