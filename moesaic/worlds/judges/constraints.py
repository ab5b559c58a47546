"""IF-CRITIC's checklist where a rule can check it: an instruction as single constraints, each kept or broken.

    share_kept("Hello.", [{"kind": "max_words", "value": 5}, {"kind": "lowercase", "weight": 2}])       # 1/3

What only a reader can judge (`text`, without a kind) is passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.strict import did_you_mean
from moesaic.worlds.judges.answer_part import after_thought
from moesaic.worlds.judges.strict_json import strict_json


@dataclass(frozen=True)
class Verdict:
    kind: str
    kept: bool
    weight: float


def share_kept(text: str, constraints: Any, all_or_nothing: bool = False) -> float:
    """The weighted share of constraints that are kept; or 1 if all are, and else 0."""
    found = verdicts(text, constraints)
    if all_or_nothing:
        return float(all(verdict.kept for verdict in found))
    return sum(v.weight for v in found if v.kept) / sum(v.weight for v in found)


def verdicts(text: str, constraints: Any) -> list[Verdict]:
    """One for each constraint that has a kind, in their order; thoughts do not count."""
    given = constraints or ()
    if not isinstance(given, list | tuple) or not all(isinstance(constraint, Mapping) for constraint in given):
        raise ValueError("its constraints are not a list of objects, each with a kind and a value")
    text = after_thought(text)
    found = [_verdict(text, constraint) for constraint in given if "kind" in constraint]
    if sum(verdict.weight for verdict in found) <= 0:
        raise ValueError("the question came without constraints that a rule can check")
    return found


def _verdict(text: str, constraint: Mapping[str, Any]) -> Verdict:
    kind, weight = str(constraint["kind"]), constraint.get("weight", 1.0)
    if kind not in KINDS:
        raise ValueError(f'no such constraint "{kind}"{did_you_mean(kind, list(KINDS))}')
    if not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"the weight of {kind} is not a number from 0 on")
    try:
        return Verdict(kind, KINDS[kind](text, constraint.get("value")), float(weight))
    except (TypeError, AttributeError, ValueError, LookupError, re.error) as error:
        raise ValueError(f"{kind}: {constraint.get('value')!r} is no value for it") from error


def _words(text: str) -> int:
    return len(text.split())


def _sentences(text: str) -> int:
    return len(re.findall(r"[^.!?。！？\s][^.!?。！？]*(?:[.!?]+(?=\s|$|[\"')\]])|[。！？]+|$)", text))


def _paragraphs(text: str) -> int:
    return len([part for part in re.split(r"\n\s*\n", text) if part.strip()])


def _bullets(text: str) -> int:
    return len(re.findall(r"^\s*(?:[-*+•]|\d+[.)])\s+\S", text, re.MULTILINE))


def _holds(text: str, words: str | list[str]) -> list[bool]:
    """For each word or phrase whether the text has it: as whole words, whatever the case."""
    listed = [words] if isinstance(words, str) else words
    return [re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None for word in listed]


def _times(text: str, value: Mapping[str, Any]) -> bool:
    found = len(re.findall(rf"(?<!\w){re.escape(value['word'])}(?!\w)", text, re.IGNORECASE))
    return bool(value.get("least", 0) <= found <= value.get("most", found))


def _one_of(text: str, choices: Any) -> bool:
    if not isinstance(choices, list | tuple):
        raise TypeError("choices are a list: a part of a text is not one of them")
    return text in choices


def _is_json(text: str, _: Any) -> bool:
    try:
        strict_json(text)
    except (ValueError, RecursionError):
        return False
    return True


KINDS: dict[str, Callable[[str, Any], bool]] = {
    "min_words": lambda text, least: _words(text) >= least,
    "max_words": lambda text, most: _words(text) <= most,
    "min_characters": lambda text, least: len(text) >= least,
    "max_characters": lambda text, most: len(text) <= most,
    "min_sentences": lambda text, least: _sentences(text) >= least,
    "max_sentences": lambda text, most: _sentences(text) <= most,
    "n_paragraphs": lambda text, count: _paragraphs(text) == int(count),
    "n_bullets": lambda text, count: _bullets(text) == int(count),
    "keyword": lambda text, words: all(_holds(text, words)),
    "any_keyword": lambda text, words: any(_holds(text, words)),
    "forbidden": lambda text, words: not any(_holds(text, words)),
    "times": _times,  # {word: ..., least: ..., most: ...}
    "starts_with": lambda text, start: text.startswith(start),
    "ends_with": lambda text, end: text.endswith(end),
    "contains": lambda text, piece: piece in text,  # to the letter, where words have no bounds
    "no_character": lambda text, characters: not set(text) & set(characters),
    "lowercase": lambda text, _: text == text.lower(),
    "uppercase": lambda text, _: text == text.upper(),
    "one_of": _one_of,
    "pattern": lambda text, pattern: re.search(pattern, text, re.MULTILINE) is not None,
    "json": _is_json,
}
