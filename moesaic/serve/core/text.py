"""Incremental detokenization: never half a character, and never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from moesaic.model.tokenizer import Tokenizer

# Enough tokens of the prompt for a tokenizer that spells a word differently at the start of a text.
CONTEXT = 4
# Markers that are part of the text, though some tokenizers list them as special tokens, which are skipped.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

INCOMPLETE = "\ufffd"  # how a character decodes that is not complete


class TextStream:
    """No stop string ends a text within its first `min_tokens`. `markers` are special tokens that are not skipped."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        markers: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer.fast
        context = list(prompt[-CONTEXT:])
        self.stream = DecodeStream(ids=context, skip_special_tokens=True)
        before = self.tokenizer.decode(context)
        self.before = before if before.endswith(INCOMPLETE) else ""  # what the stream will decode once more
        self.markers = {
            number: mark for mark in (*MARKERS, *markers) if (number := self.tokenizer.token_to_id(mark)) is not None
        }
        self.stop = tuple(stop)
        self.min_tokens = min_tokens
        self.pending: list[int] = []  # tokens that have given no text yet
        self.held = ""  # may be the start of a stop string
        self.stopped: str | None = None  # the stop string that ended it

    def push(self, token: int) -> str:
        """The text that is certain now. After a stop string nothing more comes."""
        if self.stopped is not None:
            return ""
        self.min_tokens -= 1
        text = self.held + self._decoded(token)
        ends = [(place, stop) for stop in self.stop if (place := text.find(stop)) >= 0]
        if ends and self.min_tokens < 0:
            end, self.stopped = min(ends)
            self.held = ""
            return text[:end]
        keep = max((overlap(text, stop) for stop in self.stop), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _decoded(self, token: int) -> str:
        if token in self.markers:
            broken, self.pending = self.tokenizer.decode(self.pending), []
            if broken:  # a character that will not be completed, and must not come after the marker
                self.stream, self.before = DecodeStream(ids=[], skip_special_tokens=True), ""
            return broken + self.markers[token]
        text = self.stream.step(self.tokenizer, token) or ""
        self.pending.append(token)
        if text:
            self.pending.clear()
        if text and self.before:
            # The prompt ended in an incomplete character. What the completion completes belongs to it.
            before, self.before = self.before, ""
            text = text[len(before if text.startswith(before) else before.rstrip(INCOMPLETE)) :]
        return text

    def finish(self) -> str:
        """What was held back in case a stop string came."""
        held, self.held = self.held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """How many last characters of a text are first characters of a stop string, or of a tag."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
