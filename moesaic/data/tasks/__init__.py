"""Verifiable tasks: a question, its answer, and a score for any other answer (from the package reasoning-gym, or ours).

    task = tasks("gcd", "train", 0)
    task.question, task.answer
    score(task, "12")                     # 1.0 for a right answer
    tasks("chain_sum:max_terms=2,max_digits=1", "train", 0)       # with options of the family
    tasks("chain_sum:worked=0.3", "train", 0).solution            # worked out step by step, for this share of them

Training and test never meet, in two ways at once. *Seeds*: index i of a split draws from the seeds
`FIRST_SEED[split] + i * BLOCK` to the last of that block, and the two ranges do not touch. *Content*: small families
make the same question from different seeds, so a question belongs to the test split if its hash says so (one in four)
and to the training split otherwise; of the block's seeds the first whose question belongs to the split is taken.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from moesaic.data.tasks.claims import Claims
from moesaic.data.tasks.context_qa import ContextQA
from moesaic.data.tasks.families import PRESETS, UNSUITABLE
from moesaic.data.tasks.slides import Slides
from moesaic.data.tasks.working import WORKING
from moesaic.errors import UserError
from moesaic.strict import did_you_mean

Split = Literal["train", "test"]
FIRST_SEED: dict[Split, int] = {"train": 0, "test": 1 << 30}
BLOCK = 64  # seeds of one index
INDICES = (1 << 30) // BLOCK  # of each split
WORKED = "worked"  # our own option of a family: the share of solutions that are worked out
TEST_IN = 4  # one question in so many is a test question

OWN = {"claims": Claims, "context_qa": ContextQA, "slides": Slides}  # families of our own

# Their items are made when the data set is, so that each seed needs a data set of its own.
MADE_AT_ONCE = {"acre", "gsm_symbolic"}


@dataclass(frozen=True)
class Task:
    """`answer` is None where the family knows no answer of its own and only scores what it is given; `solution` is what
    there is to learn to say: the answer, or the way to it with the answer as its last line."""

    question: str
    answer: str | None
    metadata: dict[str, Any]
    family: str
    split: Split
    index: int
    solution: str | None


def tasks(family: str, split: Split, index: int) -> Task:
    """The task with a number: the same in every process and on every machine with the same reasoning-gym."""
    check_family(family, "tasks")
    assert 0 <= index < INDICES, f"a split has {INDICES} tasks"
    first = FIRST_SEED[split] + index * BLOCK
    for seed in range(first, first + BLOCK):
        entry = _entry(family, seed)
        if (_hash(entry["question"]) % TEST_IN == 0) == (split == "test"):
            solution = _solution(family, seed, entry)
            return Task(entry["question"], entry["answer"], entry["metadata"], family, split, index, solution)
    raise UserError(family, f"makes too few different questions for a {split} split", "Choose another family.")


def score(task: Task, answer: str | None) -> float:
    """How right an answer is, from 0 to 1, as the family itself judges the whole of it or its last line."""
    lines = (answer or "").strip().splitlines()
    found = _judged(task, answer)
    return max(found, _judged(task, lines[-1].strip())) if len(lines) > 1 else found


def _judged(task: Task, answer: str | None) -> float:
    entry = {"question": task.question, "answer": task.answer, "metadata": task.metadata}
    judge = _data_set(task.family, 0).score_answer
    try:
        return float(judge(answer=answer, entry=entry))
    except Exception:  # some families' judges fail at text they did not expect, such as words for a number
        return 0.0


def as_text(task: Task) -> str:
    """A task as text to learn from."""
    return f"{opening(task)} {task.solution}\n"


def opening(task: Task) -> str:
    """The same up to the answer: what a model is given that has seen such text, and no chat."""
    return f"Question: {task.question.strip()}\nAnswer:"


def families() -> list[str]:
    """All families that can be used."""
    from reasoning_gym.factory import DATASETS

    return sorted({*DATASETS, *OWN} - set(UNSUITABLE))


@lru_cache(256)
def check_family(family: str, here: str, *, as_source: bool = False, or_set: bool = False) -> None:
    """A UserError unless there is such a family; with `as_source`, unless it gives answers to learn from; with
    `or_set`, a set of families could have been named as well."""
    name = family.partition(":")[0]
    if name in UNSUITABLE:
        raise UserError(here, f"{name} cannot be used: {UNSUITABLE[name]}", "Choose another family.")
    if name not in _known():
        known = [*PRESETS, *_known()] if or_set else _known()
        raise UserError(here, f'no family of tasks "{name}"{did_you_mean(name, known)}')
    try:
        _make(family, 0)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(here, f"options of {name} do not fit ({' '.join(str(error).split())[:200]})") from None
    if as_source and _entry(family, 0)["answer"] is None:
        raise UserError(here, f"{family} gives no answers to learn from", "Use it for evaluation or RL only.")


@lru_cache(1)
def _known() -> frozenset[str]:
    try:
        return frozenset(families())
    except ModuleNotFoundError:
        raise UserError("builtin tasks", "the package reasoning-gym is not installed", "pip install it.") from None


def _entry(family: str, seed: int) -> dict[str, Any]:
    # Elsewhere item i of seed s is item 0 of seed s + i, so one data set serves all seeds.
    if family.partition(":")[0] in MADE_AT_ONCE:
        return dict(_make(family, seed)[0])
    return dict(_data_set(family, 0)[seed])


def _make(family: str, seed: int) -> Any:
    name, options = _options(family)
    worked = options.pop(WORKED, 0)
    if worked and name not in WORKING:
        raise ValueError(f"{WORKED} is for {', '.join(WORKING)} only")
    if not isinstance(worked, int | float) or not 0 <= worked <= 1:
        raise ValueError(f"{WORKED} is a share between 0 and 1")
    if name in OWN:
        return OWN[name](**options)
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=1, **options)


def _solution(family: str, seed: int, entry: dict[str, Any]) -> str | None:
    name, options = _options(family)
    answer: str | None = entry.get("solution", entry["answer"])
    if answer is None or _hash(f"worked {seed}") % 1000 >= 1000 * options.get(WORKED, 0):
        return answer
    return "\n".join([*WORKING[name](entry["metadata"]), answer])


@lru_cache(128)
def _parsed(family: str) -> tuple[str, dict[str, Any]]:
    name, _, given = family.partition(":")
    return name, dict(_option(text) for text in given.split(",")) if given else {}


def _options(family: str) -> tuple[str, dict[str, Any]]:
    name, options = _parsed(family)
    return name, dict(options)


def _option(text: str) -> tuple[str, Any]:
    """`max_terms=2`; a value is whatever JSON makes of it, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ValueError(f'"{text}" is not of the form option=value')
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value.strip()


_data_set = lru_cache(128)(_make)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big")
