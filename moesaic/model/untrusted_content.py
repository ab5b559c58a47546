"""Conversations whose contents are data: `<|im_start|>` in a document is those characters, not the special token.

A chat template renders a conversation to text, and a tokenizer reads special tokens wherever it finds them in a text,
also where a document that was quoted in a message spelled one out. Here a mark stands for each such place while the
template is rendered, and what it stands for is encoded in pieces, none of which is a special token.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from moesaic.model.tokenizer import Tokenizer

MARK = "\ue000\ue001{}\ue002"  # code points that no text has a use for
FOUND = re.compile("\ue000\ue001(\\d+)\ue002")
FORGED = re.compile("[\ue000-\ue002]")


def encode_untrusted(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **extra: Any) -> list[int]:
    """The tokens of a conversation, opened for the assistant's answer. Roles and the like are the template's alone."""
    spelled = spelled_out(tokenizer)
    hidden: list[str] = []

    def hide(found: re.Match[str]) -> str:
        hidden.append(found[0])
        return MARK.format(len(hidden) - 1)

    def covered(content: Any) -> Any:
        if isinstance(content, list):
            return [part | {"text": covered(part["text"])} if "text" in part else part for part in content]
        if not isinstance(content, str):
            return content
        content = FORGED.sub("\N{REPLACEMENT CHARACTER}", content)
        return spelled.sub(hide, content) if spelled is not None else content

    text = tokenizer.chat([{**message, "content": covered(message.get("content"))} for message in messages], **extra)
    tokens: list[int] = []
    for place, piece in enumerate(FOUND.split(text)):  # every second piece is the number of what was hidden
        if place % 2 and int(piece) < len(hidden):
            tokens += encode_spelled(tokenizer, hidden[int(piece)])
        elif piece:
            tokens += tokenizer.encode(piece, special=False)
    return tokens


def encode_spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """What looks like a special token, as the characters it is written with."""
    return tokenizer.encode(text[:1], special=False) + tokenizer.encode(text[1:], special=False)


@lru_cache(maxsize=8)
def spelled_out(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Texts that the tokenizer would read as tokens of its own: special ones, and others that were added, such as marks
    of tool calls. Runs of white space, which some add to write code in fewer tokens, are text."""
    added = (token.content for token in tokenizer.fast.get_added_tokens_decoder().values())
    marks = sorted({mark for mark in added if len(mark.strip()) > 1}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, marks))) if marks else None
