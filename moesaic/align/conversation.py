"""A conversation as tokens, and which of them the assistant said: those are what is learned."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from tokenizers import Encoding

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """`learn[i]` tells whether token i was the assistant's, its end mark included."""

    tokens: list[int]
    learn: list[bool]


@dataclass(frozen=True)
class Written:
    """A conversation as the template writes it, and from where to where the assistant speaks."""

    text: str
    spoken: list[tuple[int, int]]


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
    for number in turns:
        before = tokenizer.chat([dict(m) for m in messages[:number]], reply=True, **options)
        runner = tokenizer.chat([dict(m) for m in messages[: number + 1]], reply=False, **options)
        if not runner.startswith(before):
            raise UserError("messages", "the chat template does not put an answer behind its opening", "Mend it.")
        texts.append((len(before), runner))
    last = texts[-1][1]
    if all(last.startswith(runner) for _, runner in texts):
        return [Written(last, [(start, len(runner)) for start, runner in texts])]
    return [Written(runner, [(start, len(runner))]) for start, runner in texts]


def read_written(tokenizer: Tokenizer, written: Sequence[Written]) -> list[Said]:
    """All at once, which is much quicker than one by one."""
    every = tokenizer.fast.encode_batch([one.text for one in written], add_special_tokens=False)
    return [_mark(encoded, one.spoken) for encoded, one in zip(every, written, strict=True)]


def read_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None, since: int = 0
) -> list[Said]:
    return read_written(tokenizer, write_conversation(tokenizer, messages, tools, since))


def _mark(encoded: Encoding, spoken: Sequence[tuple[int, int]]) -> Said:
    offsets = encoded.offsets
    learn = [False] * len(offsets)
    for start, stop in spoken:
        for number in range(bisect_left(offsets, start, key=itemgetter(0)), len(offsets)):
            begin, end = offsets[number]
            if begin >= stop:
                break
            learn[number] = begin < end <= stop
    return Said(list(encoded.ids), learn)
