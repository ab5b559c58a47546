"""APAR's training data: structured answers taken apart into what is said one after the other and what can be said in
parallel, marked by fork and child tokens.

    align: {stages: [{name: sft, forks: true, data: [{path: answers.jsonl}], steps: 200}]}

A list gives a fork at the end of each item's head ("1. Salt:"), paragraphs one at the end of each first sentence; the
rest of the item or paragraph is a branch. Of one answer several conversations are learned: that of the parent, which
forks and goes on with the next point, and one for each branch, which sees the parent only up to its fork. Put back in
their places, the branches give the answer as it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesaic.align.conversation import Said
from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.branches import CHILD, FORK

ITEM = re.compile(r"^[ \t]*(?:[-*+]|\d+[.)])[ \t]+", re.MULTILINE)
HEAD = re.compile(r".+?(?::\*\*|\*\*:|:|[.!?](?=\s)|\s[-\u2013\u2014](?=\s))", re.DOTALL)  # a name, or a first sentence
SENTENCE = re.compile(r".+?[.!?][\"')\]]*(?=\s)", re.DOTALL)
LEAST = 12  # characters of a branch: a shorter one is said sooner than begun


@dataclass(frozen=True)
class Forked:
    """An answer as its parent says it, with a fork token where each branch left, and the branches in order."""

    parent: str
    branches: tuple[str, ...]

    @property
    def joined(self) -> str:
        """The answer as it was."""
        parts = self.parent.split(FORK)
        return "".join(part + branch for part, branch in zip(parts, (*self.branches, ""), strict=True))

    def beginnings(self) -> list[str]:
        """For each branch, all that it sees of the answer, and the token it begins with."""
        parts = self.parent.split(FORK)
        return [FORK.join([*parts[: number + 1], ""]) + CHILD for number in range(len(self.branches))]


def forked(answer: str) -> Forked:
    """Without branches where there is nothing to say in parallel."""
    for blocks, head in ((_items(answer), HEAD), (_paragraphs(answer), SENTENCE)):
        cuts = [cut for start, stop in blocks if (cut := _cut(answer, start, stop, head)) is not None]
        if len(cuts) >= 2:
            return _apart(answer, cuts)
    return Forked(answer, ())


def _items(answer: str) -> list[tuple[int, int]]:
    """From where to where each item of a list goes, its mark left out."""
    marks = list(ITEM.finditer(answer))
    ends = [mark.start() for mark in marks[1:]] + [len(answer)]
    found = []
    for mark, end in zip(marks, ends):
        blank = answer.find("\n\n", mark.end(), end)  # what follows the list is no part of its last item
        found.append((mark.end(), end if blank < 0 or end < len(answer) else blank))
    return found


def _paragraphs(answer: str) -> list[tuple[int, int]]:
    found, start = [], 0
    for gap in [*re.finditer(r"\n{2,}", answer), None]:
        stop = gap.start() if gap is not None else len(answer)
        if stop > start:
            found.append((start, stop))
        start = gap.end() if gap is not None else stop
    return found


def _cut(answer: str, start: int, stop: int, head: re.Pattern[str]) -> tuple[int, int] | None:
    """From where to where a block is a branch: what follows its head, without the space behind it."""
    stop = start + len(answer[start:stop].rstrip())
    found = head.match(answer, start, stop)
    if found is None or stop - found.end() < LEAST:
        return None
    return found.end(), stop


def _apart(answer: str, cuts: Sequence[tuple[int, int]]) -> Forked:
    parent, place = "", 0
    for start, stop in cuts:
        parent += answer[place:start] + FORK
        place = stop
    return Forked(parent + answer[place:], tuple(answer[start:stop] for start, stop in cuts))


def conversations(messages: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Of one conversation: that of the parent first, then one for each branch of its last answer."""
    last = messages[-1]
    content = last.get("content")
    if last.get("role") != "assistant" or not isinstance(content, str):
        return [list(messages)]
    if FORK in content or CHILD in content:
        raise UserError(
            "messages", f"the answer holds {FORK} or {CHILD} already", "Give it without: forks are made here."
        )
    parts = forked(content)
    texts = [parts.parent, *(before + branch for before, branch in zip(parts.beginnings(), parts.branches))]
    return [[*messages[:-1], {**last, "content": text}] for text in texts]


def only_the_branch(said: Said, child: int) -> Said:
    """A branch learns what it says itself: neither the parent before it, nor the token it is begun with."""
    if child not in said.tokens:
        return said
    begins = said.tokens.index(child) + 1
    return replace(said, learn=[False] * begins + said.learn[begins:])


def child_token(tokenizer: Tokenizer) -> int:
    fork, child = (tokenizer.fast.token_to_id(mark) for mark in (FORK, CHILD))
    if fork is None or child is None:
        raise UserError("align.stages.forks", f"the tokenizer has no {FORK} and {CHILD}", "Add them as special tokens.")
    return int(child)
