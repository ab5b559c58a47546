"""Step-by-step solutions (chains of thought), where a few lines of code can write them; the answer is the last line. A
model trained on both kinds can find out by RL that one of them is right more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def chain_sum(metadata: dict[str, Any]) -> list[str]:
    """9 - 6 + 8: from left to right, a line for each step."""
    first, *rest = metadata["expression"].split()
    lines, total = [], int(first)
    for sign, number in zip(rest[::2], rest[1::2], strict=True):
        before, total = total, total + int(sign + number)
        lines.append(f"{before}{sign}{number}={total}")
    return lines


def gcd(metadata: dict[str, Any]) -> list[str]:
    """Euclid's way: what is left of the larger by the smaller, until nothing is."""
    divisor, *rest = metadata["numbers"]
    lines = []
    for number in rest:
        larger, divisor = max(number, divisor), min(number, divisor)
        while left := larger % divisor:
            lines.append(f"{larger} mod {divisor}={left}")
            larger, divisor = divisor, left
        lines.append(f"{larger} mod {divisor}=0")
    return lines


def leg_counting(metadata: dict[str, Any]) -> list[str]:
    """A line for each kind of animal: how many, the legs of one, and the legs so far."""
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    lines, total = [], 0
    for animal, count in metadata["animals"].items():
        total += (legs := count * ANIMALS[animal])
        lines.append(f"{animal} {count}*{ANIMALS[animal]}={legs}, {total}")
    return lines


def letter_counting(metadata: dict[str, Any]) -> list[str]:
    """A line for each word: its letters, and how often the one that is asked for has been seen so far."""
    lines, seen = [], 0
    for word in metadata["span"]:
        seen += word.lower().count(metadata["target_letter"])
        lines.append(f"{' '.join(word.lower())}: {seen}")
    return lines


# The lines before the answer.
WORKING: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "chain_sum": chain_sum,
    "gcd": gcd,
    "leg_counting": leg_counting,
    "letter_counting": letter_counting,
}
