"""Small functions with faults to plant in them, and inputs to tell the right one from the wrong one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Arguments = list[Any]  # of one call, as JSON


@dataclass(frozen=True)
class Routine:
    name: str
    source: str
    faults: tuple[tuple[str, str], ...]  # a line as it should be (without indentation), and as it is wrong
    inputs: Callable[[random.Random], Arguments]

    def broken(self, fault: tuple[str, str]) -> str:
        """With one line that is wrong."""
        lines = self.source.splitlines()
        at = next(n for n, line in enumerate(lines) if line.strip() == fault[0])
        lines[at] = lines[at].replace(fault[0], fault[1])
        return "\n".join(lines) + "\n"


def _numbers(draw: random.Random, least: int = 0, most: int = 9, low: int = -20, high: int = 20) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(least, most))]


def _word(draw: random.Random, letters: str, least: int = 0, most: int = 10) -> str:
    return "".join(draw.choice(letters) for _ in range(draw.randint(least, most)))


def _spans(draw: random.Random) -> Arguments:
    starts = [draw.randint(0, 20) for _ in range(draw.randint(1, 6))]
    return [[[start, start + draw.randint(0, 6)] for start in starts]]


def _sorted_and_one(draw: random.Random) -> Arguments:
    values = sorted(draw.sample(range(30), draw.randint(1, 9)))
    return [values, draw.choice([values[0], values[-1], draw.choice(values), draw.randint(0, 30)])]


ROUTINES = (
    Routine(
        "position",
        '''def position(values, wanted):
    """The place of a number in a sorted list, or -1."""
    low, high = 0, len(values) - 1
    while low <= high:
        middle = (low + high) // 2
        if values[middle] == wanted:
            return middle
        if values[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1
''',
        (
            ("low, high = 0, len(values) - 1", "low, high = 0, len(values) - 2"),
            ("while low <= high:", "while low < high:"),
            ("if values[middle] < wanted:", "if values[middle] > wanted:"),
        ),
        _sorted_and_one,
    ),
    Routine(
        "merge_spans",
        '''def merge_spans(spans):
    """Spans that touch or overlap as one, in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
''',
        (
            ("for start, end in sorted(spans):", "for start, end in spans:"),
            ("if merged and start <= merged[-1][1]:", "if merged and start < merged[-1][1]:"),
            ("merged[-1][1] = max(merged[-1][1], end)", "merged[-1][1] = end"),
        ),
        _spans,
    ),
    Routine(
        "run_lengths",
        '''def run_lengths(text):
    """Each run of equal characters as the character and its length: aab is a2b1."""
    parts = []
    start = 0
    for at in range(1, len(text) + 1):
        if at == len(text) or text[at] != text[start]:
            parts.append(text[start] + str(at - start))
            start = at
    return "".join(parts)
''',
        (
            ("for at in range(1, len(text) + 1):", "for at in range(1, len(text)):"),
            ("parts.append(text[start] + str(at - start))", "parts.append(text[start] + str(at - start + 1))"),
            ("start = at", "start = at - 1"),
        ),
        lambda draw: [_word(draw, "ab", 0, 12)],
    ),
    Routine(
        "balanced",
        '''def balanced(text):
    """Whether all brackets are closed, in the right order."""
    pairs = {")": "(", "]": "[", "}": "{"}
    open_ones = []
    for sign in text:
        if sign in pairs.values():
            open_ones.append(sign)
        elif sign in pairs:
            if not open_ones or open_ones.pop() != pairs[sign]:
                return False
    return not open_ones
''',
        (
            ("return not open_ones", "return True"),
            ("if not open_ones or open_ones.pop() != pairs[sign]:", "if not open_ones or not open_ones.pop():"),
            ("open_ones.append(sign)", "open_ones.insert(0, sign)"),
        ),
        lambda draw: [draw.choice(["", "()", "[]", "{[]}", "([{}])"]) + _word(draw, "()[]{}", 0, 4)],
    ),
    Routine(
        "to_base",
        '''def to_base(number, base):
    """A number from 0 up, written in a base from 2 to 16."""
    if number == 0:
        return "0"
    digits = ""
    while number > 0:
        digits = "0123456789abcdef"[number % base] + digits
        number //= base
    return digits
''',
        (
            ('return "0"', 'return ""'),
            ('digits = "0123456789abcdef"[number % base] + digits', 'digits += "0123456789abcdef"[number % base]'),
            ("while number > 0:", "while number > base:"),
        ),
        lambda draw: [draw.choice([0, draw.randint(1, 500)]), draw.randint(2, 16)],
    ),
    Routine(
        "moving_sums",
        '''def moving_sums(values, width):
    """The sum of every stretch of so many neighbours."""
    sums = []
    total = sum(values[:width])
    for end in range(width, len(values) + 1):
        sums.append(total)
        if end < len(values):
            total += values[end] - values[end - width]
    return sums
''',
        (
            ("for end in range(width, len(values) + 1):", "for end in range(width, len(values)):"),
            ("total += values[end] - values[end - width]", "total += values[end]"),
            ("total = sum(values[:width])", "total = sum(values[:width - 1])"),
        ),
        lambda draw: [_numbers(draw, 3, 9), draw.randint(1, 3)],
    ),
    Routine(
        "fewest_coins",
        '''def fewest_coins(amount, coins):
    """The fewest coins that make an amount, or -1."""
    fewest = [0] + [-1] * amount
    for value in range(1, amount + 1):
        for coin in coins:
            if coin <= value and fewest[value - coin] >= 0:
                if fewest[value] < 0 or fewest[value - coin] + 1 < fewest[value]:
                    fewest[value] = fewest[value - coin] + 1
    return fewest[amount]
''',
        (
            ("if coin <= value and fewest[value - coin] >= 0:", "if coin < value and fewest[value - coin] >= 0:"),
            ("fewest = [0] + [-1] * amount", "fewest = [0] * (amount + 1)"),
            (
                "if fewest[value] < 0 or fewest[value - coin] + 1 < fewest[value]:",
                "if fewest[value] < 0 or fewest[value - coin] + 1 > fewest[value]:",
            ),
        ),
        lambda draw: [draw.randint(0, 30), sorted(draw.sample(range(1, 12), 3))],
    ),
    Routine(
        "common_start",
        '''def common_start(words):
    """The longest start that all words share."""
    if not words:
        return ""
    first = min(words)
    last = max(words)
    at = 0
    while at < min(len(first), len(last)) and first[at] == last[at]:
        at += 1
    return first[:at]
''',
        (
            ("return first[:at]", "return first[: at + 1]"),
            ("last = max(words)", "last = words[-1]"),
            ("at = 0", "at = 1"),
        ),
        lambda draw: [[_word(draw, "a", 0, 3) + _word(draw, "ab", 1, 4) for _ in range(draw.randint(1, 4))]],
    ),
    Routine(
        "rotate",
        '''def rotate(rows):
    """A table turned a quarter to the right."""
    turned = []
    for column in range(len(rows[0])):
        turned.append([row[column] for row in reversed(rows)])
    return turned
''',
        (
            ("for column in range(len(rows[0])):", "for column in range(len(rows)):"),
            ("turned.append([row[column] for row in reversed(rows)])", "turned.append([row[column] for row in rows])"),
        ),
        lambda draw: [[[draw.randint(0, 9) for _ in range(3)] for _ in range(draw.choice([1, 2, 4]))]],
    ),
    Routine(
        "best_stretch",
        '''def best_stretch(values):
    """The largest sum of neighbours, 0 if there is none above it."""
    best = 0
    here = 0
    for value in values:
        here = max(here + value, 0)
        best = max(best, here)
    return best
''',
        (
            ("here = max(here + value, 0)", "here = max(here, value)"),
            ("best = max(best, here)", "best = here"),
            ("here = max(here + value, 0)", "here = here + value"),
        ),
        lambda draw: [[draw.randint(1, 9), -draw.randint(10, 20), *_numbers(draw, 1, 7), -draw.randint(1, 9)]],
    ),
)
