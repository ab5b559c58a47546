"""PDF: the text of its pages, by pypdf, which bounds what a stream may unpack to."""

from __future__ import annotations

import io
import logging
import re
from typing import Any

from moesaic.know.documents.document import Document, Raw, Unreadable
from moesaic.know.documents.plain import clean

MAX_PAGES = 10_000
MAX_CHARACTERS = 64 * 2**20
_HYPHEN = re.compile(r"(?<=[a-zà-ÿ])-\n(?=[a-zà-ÿ])")
_WRAPPED = re.compile(r"(?<=[^\n]{40})(?<![.!?:])\n(?=[^\s•–*\-\d])")  # a line that goes on in the next


def read(raw: Raw) -> list[Document]:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what it mends is no news to a reader
    try:
        reader = pypdf.PdfReader(io.BytesIO(raw.bytes))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("is encrypted")
        count = len(reader.pages)
        title = reader.metadata.title if reader.metadata else None
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # of broken files it may be any
        raise Unreadable(f"is not a PDF that can be read ({_said(error)})") from None
    if count > MAX_PAGES:
        raise Unreadable(f"has {count} pages, at most {MAX_PAGES}")
    text, starts = _pages(raw, reader, count)
    named = " ".join(title.split()) if isinstance(title, str) else ""
    return [Document(raw.source, named or raw.name, text, pages=starts)]


def _pages(raw: Raw, reader: Any, count: int) -> tuple[str, tuple[int, ...]]:
    pages: list[str] = []
    starts: list[int] = []
    position = 0
    for number in range(count):
        try:
            page = reader.pages[number].extract_text()
        except MemoryError:
            raise
        except Exception as error:  # as above
            raw.skip(f" page {number + 1}", f"cannot be read ({_said(error)})")
            page = ""
        page = _WRAPPED.sub(" ", _HYPHEN.sub("", clean(page).strip()))
        starts.append(position)
        pages.append(page)
        position += len(page) + 2
        if position > MAX_CHARACTERS:
            raise Unreadable(f"has more than {MAX_CHARACTERS} characters")
    return "\n\n".join(pages), tuple(starts)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__
