"""Tokens to text as they come: never half a character, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from moesaic.model.tokenizer import Tokenizer

# Enough tokens of the prompt for a tokenizer that spells a word differently at the start of a text.
CONTEXT = 4
# Marks that are part of what a model says, though some tokenizers list them with those that only end or divide texts.
SAID = ("<think>", "</think>", "<tool_call>", "</tool_call>")

HALF = "\ufffd"  # how a character reads that is not all there


class TextStream:
    """No stop string ends a text within its `least` first tokens."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stop: Sequence[str] = (), least: int = 0
    ) -> None:
        self.tokenizer = tokenizer.fast
        context = list(prompt[-CONTEXT:])
        self.stream = DecodeStream(ids=context, skip_special_tokens=True)
        before = self.tokenizer.decode(context)
        self.before = before if before.endswith(HALF) else ""  # what the stream will tell once more
        self.said = {number: mark for mark in SAID if (number := self.tokenizer.token_to_id(mark)) is not None}
        self.stop = tuple(stop)
        self.least = least
        self.half: list[int] = []  # tokens that have said nothing yet
        self.held = ""  # could be the beginning of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now. After a stop string nothing more comes."""
        if self.stopped:
            return ""
        self.least -= 1
        text = self.held + self._said(token)
        ends = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        if ends and self.least < 0:
            self.stopped, self.held = True, ""
            return text[: min(ends)]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _said(self, token: int) -> str:
        if token in self.said:
            broken, self.half = self.tokenizer.decode(self.half), []
            if broken:  # a character that will not be whole any more, and must not come after the mark
                self.stream, self.before = DecodeStream(ids=[], skip_special_tokens=True), ""
            return broken + self.said[token]
        text = self.stream.step(self.tokenizer, token) or ""
        self.half.append(token)
        if text:
            self.half.clear()
        if text and self.before:
            # The prompt ended in half a character. What the answer made whole is the answer's.
            before, self.before = self.before, ""
            text = text[len(before if text.startswith(before) else before.rstrip(HALF)) :]
        return text

    def finish(self) -> str:
        """What was held back in case a stop string came."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many last characters of a text are first characters of a stop string, or of a tag."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
