"""Conversations whose contents are data: `<|im_start|>` in a document is those characters, not the special token.

A chat template renders a conversation to text, and a tokenizer reads special tokens wherever it finds them in a text,
also where a document that was quoted in a message spelled one out. Here a mark stands for each such place while the
template is rendered, and what it stands for is encoded in pieces, none of which is a special token.

    covered = Covered(tokenizer, messages)
    tokens = covered.encode(tokenizer.chat(covered.messages))       # encode_untrusted does these two
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

MARK = "\ue000\ue001{}\ue002"  # code points that no text has a use for
FOUND = re.compile("\ue000\ue001(\\d+)\ue002")
FORGED = re.compile("[\ue000-\ue002]")


class Covered:
    """A conversation with marks in place of what would be read as special tokens. What `trusted` roles say stays as it
    is: a model's own turns may hold tokens of its own."""

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], trusted: Collection[str] = ()
    ) -> None:
        self.tokenizer, self.spelled = tokenizer, spelled_out(tokenizer)
        self.hidden: list[str] = []
        self.messages: list[dict[str, Any]] = [
            {**message, "content": self._cover(message.get("content"), message.get("role") not in trusted)}
            for message in messages
        ]

    def pieces(self, text: str) -> list[tuple[str, str]]:
        """A text that was rendered from these messages, in parts: as it is to be read, and as it stands there, which
        differs where something was hidden."""
        found = []
        for place, piece in enumerate(FOUND.split(text)):  # every second piece is the number of what was hidden
            if place % 2 and int(piece) < len(self.hidden):
                found.append((self.hidden[int(piece)], MARK.format(piece)))
            elif piece:
                found.append((piece, piece))
        return found

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece, written in self.pieces(text):
            spelled = piece is not written
            tokens += encode_spelled(self.tokenizer, piece) if spelled else self.tokenizer.encode(piece, special=False)
        return tokens

    def _cover(self, content: Any, untrusted: bool) -> Any:
        if isinstance(content, list):
            for part in content:
                if "text" not in part:  # a template passes over it, and nobody would know that it was not seen
                    problem = f"holds {part.get('type', 'something')}, and this model reads text alone"
                    raise UserError("a message", problem, "Ask a model that sees, behind a URL, or leave it out.")
            return [{**part, "text": self._cover(part["text"], untrusted)} for part in content]
        if not isinstance(content, str):
            return content
        content = FORGED.sub("\N{REPLACEMENT CHARACTER}", content)
        return self.spelled.sub(self._hide, content) if untrusted and self.spelled is not None else content

    def _hide(self, found: re.Match[str]) -> str:
        self.hidden.append(found[0])
        return MARK.format(len(self.hidden) - 1)


def encode_untrusted(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], trusted: Collection[str] = (), **extra: Any
) -> list[int]:
    """The tokens of a conversation, opened for the assistant's answer. Roles and the like are the template's alone."""
    covered = Covered(tokenizer, messages, trusted)
    return covered.encode(tokenizer.chat(covered.messages, **extra))


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
