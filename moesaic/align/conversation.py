"""A conversation as tokens, and which of them the assistant said: those are what is learned.

What others said is data, as it is where the model is asked (`worlds/completions.py`): a mark of a chat template in a
question, or in what a tool found, is the characters it is written with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.untrusted_content import Covered, encode_spelled
from moesaic.worlds.completions import SPEAKERS

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """`learn[i]` tells whether token i was the assistant's, its end mark included."""

    tokens: list[int]
    learn: list[bool]


@dataclass(frozen=True)
class Written:
    """A conversation as the template writes it, and from where to where the assistant speaks. Its `parts` are as they
    are to be read, and as they stand in the text; none: all of it is read as it stands."""

    text: str
    spoken: list[tuple[int, int]]
    parts: list[tuple[str, str]] = field(default_factory=list)


def write_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None, since: int = 0
) -> list[Written]:
    """One text; or one for each answer, where the template shows earlier turns otherwise than it showed them when they
    were said (some leave earlier thoughts out). What was said before message `since` does not count as spoken."""
    options = {"tools": list(tools)} if tools else {}
    turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    turns = [number for number in turns if number >= since]
    if not turns:
        raise UserError("messages", "hold nothing that an assistant said", "Add a message of role assistant.")
    texts = []
    covered = Covered(tokenizer, messages, trusted=SPEAKERS)
    for number in turns:
        before = tokenizer.chat(covered.messages[:number], reply=True, **options)
        runner = tokenizer.chat(covered.messages[: number + 1], reply=False, **options)
        if not runner.startswith(before):
            raise UserError("messages", "the chat template does not put an answer behind its opening", "Mend it.")
        texts.append((len(before), runner))
    last = texts[-1][1]
    if all(last.startswith(runner) for _, runner in texts):
        return [_written(covered, last, [(start, len(runner)) for start, runner in texts])]
    return [_written(covered, runner, [(start, len(runner))]) for start, runner in texts]


def _written(covered: Covered, text: str, spoken: list[tuple[int, int]]) -> Written:
    return Written(text, spoken, covered.pieces(text) if covered.hidden else [])


def read_written(tokenizer: Tokenizer, written: Sequence[Written]) -> list[Said]:
    """All at once, which is much quicker than one by one."""
    every = tokenizer.fast.encode_batch(["" if one.parts else one.text for one in written], add_special_tokens=False)
    return [
        _mark_parts(tokenizer, one) if one.parts else _mark(encoded.ids, encoded.offsets, one.spoken)
        for encoded, one in zip(every, written, strict=True)
    ]


def read_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None, since: int = 0
) -> list[Said]:
    return read_written(tokenizer, write_conversation(tokenizer, messages, tools, since))


def _mark_parts(tokenizer: Tokenizer, written: Written) -> Said:
    """Part by part, as the engine is asked; what was hidden is nobody's turn, and has no place in the text."""
    tokens: list[int] = []
    offsets: list[tuple[int, int]] = []
    place = 0
    for read, stands in written.parts:
        if read is stands:
            encoded = tokenizer.fast.encode(read, add_special_tokens=False)
            tokens += encoded.ids
            offsets += [(place + begin, place + end) for begin, end in encoded.offsets]
        else:
            spelled = encode_spelled(tokenizer, read)
            tokens += spelled
            offsets += [(place, place)] * len(spelled)
        place += len(stands)
    return _mark(tokens, offsets, written.spoken)


def _mark(tokens: Sequence[int], offsets: Sequence[tuple[int, int]], spoken: Sequence[tuple[int, int]]) -> Said:
    learn = [False] * len(offsets)
    for start, stop in spoken:
        for number in range(bisect_left(offsets, start, key=itemgetter(0)), len(offsets)):
            begin, end = offsets[number]
            if begin >= stop:
                break
            learn[number] = begin < end <= stop
    return Said(list(tokens), learn)
