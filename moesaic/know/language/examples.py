"""Examples for SFT from generated worlds: question to program, by way of anchors.

    write(Path("anchored.jsonl"), range(300), style="anchors")        # then: align, a stage of sft over the file

Styles: `plain` (the program at once), `anchors` (the names and relations it is about, then the program: intermediate
supervision).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from moesaic import atomic
from moesaic.data.tasks.multihop import Question, world
from moesaic.know.language.anchors import Anchors, anchors_of
from moesaic.know.language.grammar import grammar

Style = Literal["plain", "anchors"]
STYLES: tuple[Style, ...] = get_args(Style)
THEN = " => "  # between anchors and program


@dataclass(frozen=True)
class Asked:
    """A question as a model sees it, and how what it writes is turned into a program."""

    text: str
    names: tuple[str, ...]  # of the graph, that the question mentions

    def program(self, written: str, style: Style) -> str:
        return written.rpartition(THEN)[2] if style == "anchors" else written

    def grammar(self, relations: Iterable[str], style: Style) -> str:
        """Programs over the names that the question mentions."""
        before = f"anchor+ {json.dumps(THEN.lstrip())}" if style == "anchors" else ""
        found = grammar(self.names, relations, before, simple=True)
        return found + ('anchor: name " " | plain " "\n' if before else "")


def asked(question: str, finder: Anchors) -> Asked:
    return Asked(question, tuple(dict.fromkeys(name for _, _, name in finder.names.places(question))))


def target(question: Question, style: Style) -> str:
    return f"{anchors_of(question.program)}{THEN}{question.program}" if style == "anchors" else question.program


def examples(seeds: Iterable[int], style: Style, **options: Any) -> Iterator[dict[str, Any]]:
    """Conversations; `options` are those of `world`."""
    for seed in seeds:
        for question in world(seed, **options).questions:
            said = [("user", question.text), ("assistant", target(question, style))]
            yield {"messages": [{"role": role, "content": content} for role, content in said]}


def write(path: Path, seeds: Iterable[int], style: Style, **options: Any) -> int:
    """The number of examples written."""
    lines = [json.dumps(example, ensure_ascii=False) + "\n" for example in examples(seeds, style, **options)]
    atomic.write_text(path, "".join(lines))
    return len(lines)
