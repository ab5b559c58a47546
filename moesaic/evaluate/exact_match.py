"""Exact match and F1 of short answers, normalised as SQuAD, HotpotQA and MuSiQue do it."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
DECIDED = {"yes", "no", "noanswer"}  # half of one is wrong


def normalised(text: str) -> str:
    """Small letters, without punctuation and articles, one space between words."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact(answer: str, truths: Iterable[str]) -> bool:
    return any(normalised(answer) == normalised(truth) for truth in truths)


def f1(answer: str, truths: Iterable[str]) -> float:
    """Of the words, with that truth which fits best."""
    return max((_f1(normalised(answer), normalised(truth)) for truth in truths), default=0.0)


def _f1(answer: str, truth: str) -> float:
    if answer != truth and (answer in DECIDED or truth in DECIDED):
        return 0.0
    said, true = answer.split(), truth.split()
    shared = sum((Counter(said) & Counter(true)).values())
    if not said or not true or not shared:
        return float(said == true)
    precision, recall = shared / len(said), shared / len(true)
    return 2 * precision * recall / (precision + recall)
