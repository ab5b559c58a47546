"""Plain text, and the text in bytes of any other format."""

from __future__ import annotations

import codecs
import re

from moesaic.know.documents.document import Document, Raw, Unreadable

_BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f]")


def decoded(raw: bytes) -> str:
    """UTF-8, or what a byte order mark says; lines end with one character."""
    encoding = next((name for mark, name in _BOMS.items() if raw.startswith(mark)), "utf-8")
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 text (byte {error.start})") from None
    if "\0" in text:
        raise Unreadable("is not text: it holds zero bytes")
    return clean(text)


def clean(text: str) -> str:
    """One kind of line end, and no characters that only steer a terminal."""
    return _CONTROLS.sub(" ", text.replace("\r\n", "\n").replace("\r", "\n"))


def read(raw: Raw) -> list[Document]:
    return [Document(raw.source, raw.name, decoded(raw.bytes))]
