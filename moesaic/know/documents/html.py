"""HTML: the main text of a page with its headings, by trafilatura. Nothing is run, and nothing is fetched.

Scripts, styles, frames and what a page refers to elsewhere are no text; entities that a page defines are not expanded.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

from moesaic.know.documents.document import Document, Raw, Unreadable
from moesaic.know.documents.markdown import markdown_headings, titled
from moesaic.know.documents.plain import clean
from moesaic.units import readable_bytes

if TYPE_CHECKING:
    from configparser import ConfigParser

MAX_BYTES = 32 * 2**20
_NO_TEXT = "//script | //style | //noscript | //template | //iframe | //object | //embed | //svg | //nav | //footer"
# Of entities, in the document type, which stands first.
_DECLARATIONS = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?<!DOCTYPE[^>\[]*\[.*?\]\s*>", re.DOTALL | re.IGNORECASE)
_ESCAPED = re.compile(r"\\([<>\[\]#*_`|])")


def read(raw: Raw) -> list[Document]:
    if len(raw.bytes) > MAX_BYTES:
        size = readable_bytes(MAX_BYTES)
        raise Unreadable(f"is too large for a page ({readable_bytes(len(raw.bytes))}, at most {size})")
    import trafilatura

    declared = _DECLARATIONS.match(raw.bytes)
    page = raw.bytes[declared.end() if declared else 0 :]
    tree = trafilatura.load_html(page)
    if tree is None:  # a piece of a page is none to trafilatura
        tree = trafilatura.load_html(b"<html><body>" + page + b"</body></html>")
    if tree is None:
        raise Unreadable("is not HTML")
    title = " ".join((tree.findtext(".//title") or "").split())
    _prepare(tree)
    found = trafilatura.extract(
        tree, output_format="markdown", include_comments=False, favor_recall=True, fast=True, config=_settings()
    )
    text = clean(_ESCAPED.sub(r"\1", found or "")).replace("¶", "")
    if not text.strip():  # too little for it to be a page to trafilatura
        text = clean(" ".join(" ".join(tree.xpath("//body//text()")).split()))
    return [titled(raw, text, markdown_headings(text), title)]


def _prepare(tree: Any) -> None:
    """All of a page that does not say what its main part is, is its main part: manuals are written so."""
    for element in tree.xpath(_NO_TEXT):
        if element.getparent() is not None:
            element.drop_tree()
    body = tree.find(".//body")
    if body is not None and body.find(".//main") is None and body.find(".//article") is None:
        main = body.makeelement("main")
        main.text, body.text = body.text, None
        main.extend(list(body))
        body.append(main)


@cache
def _settings() -> ConfigParser:
    from trafilatura.settings import use_config

    config: ConfigParser = use_config()
    for name in ("MIN_EXTRACTED_SIZE", "MIN_OUTPUT_SIZE"):
        config.set("DEFAULT", name, "1")  # short pages are pages
    return config
