"""A conversation as tokens, and which of them the assistant said: those are what is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """`learn[i]` tells whether token i was the assistant's, its end mark included."""

    tokens: list[int]
    learn: list[bool]


def read_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None, since: int = 0
) -> list[Said]:
    """One sequence; or one for each answer, where the template shows earlier turns otherwise than it showed them when
    they were said (some leave earlier thoughts out). What was said before message `since` is not learned."""
    options = {"tools": list(tools)} if tools else {}
    turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
    turns = [number for number in turns if number >= since]
    if not turns:
        raise UserError("messages", "hold nothing that an assistant said", "Add a message of role assistant.")
    texts = []
    for number in turns:
        before = tokenizer.chat([dict(m) for m in messages[:number]], reply=True, **options)
        through = tokenizer.chat([dict(m) for m in messages[: number + 1]], reply=False, **options)
        if not through.startswith(before):
            raise UserError("messages", "the chat template does not put an answer behind its opening", "Mend it.")
        texts.append((len(before), through))
    last = texts[-1][1]
    if all(last.startswith(through) for _, through in texts):
        return [_mark(tokenizer, last, [(start, len(through)) for start, through in texts])]
    return [_mark(tokenizer, through, [(start, len(through))]) for start, through in texts]


def _mark(tokenizer: Tokenizer, text: str, spoken: Sequence[tuple[int, int]]) -> Said:
    encoded = tokenizer.fast.encode(text, add_special_tokens=False)
    learn = [
        any(start <= begin and end <= stop for start, stop in spoken) and begin < end for begin, end in encoded.offsets
    ]
    return Said(list(encoded.ids), learn)


def opening(tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
    """The tokens up to where the assistant is about to speak."""
    options = {"tools": list(tools)} if tools else {}
    text = tokenizer.chat([dict(message) for message in messages], reply=True, **options)
    return tokenizer.encode(text, special=False)
