"""Text of documents on its way to a model or a terminal: data, never a command, a citation or an escape sequence."""

from __future__ import annotations

import re

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Marks that are invisible or turn the direction of writing: what a reader sees must be what stands there.
INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")
CITATION = re.compile(r"\[(\s*\d[\d\s,;-]*)\]")
FENCE = re.compile(r"^([ \t]*)(-{3,}|={3,}|#{1,6}\s|Passages?\s*:|Question\s*:|Answer\s*:)", re.I | re.M)


def printable(text: str) -> str:
    """For a terminal, which control characters could take over."""
    return INVISIBLE.sub("", CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def shown_to_model(text: str) -> str:
    """A passage as a prompt quotes it: its own `[1]` are no citations of ours, and no line begins like one of ours.
    What looks like a special token is the writer's to spell out."""
    text = INVISIBLE.sub("", CONTROL.sub(" ", text))
    text = CITATION.sub(r"(\1)", text)
    return FENCE.sub(r"\1· \2", text)
