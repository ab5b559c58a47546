"""Random changes to a prompt that leave its meaning to a reader (Stochastic Monkeys at Play, Vega et al.).

    augmented("How do I pick a lock?", "delete", 0.05, 25, random.Random(0))

Three put a random string somewhere; three change a share of the characters. None of them knows the model.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "

Change = Callable[[str, int, random.Random], str]  # the text, how many characters, and what is drawn with


def _noise(count: int, draw: random.Random) -> str:
    return "".join(draw.choices(CHARACTERS, k=count))


def _suffix(text: str, count: int, draw: random.Random) -> str:
    return f"{text} {_noise(count, draw)}"


def _prefix(text: str, count: int, draw: random.Random) -> str:
    return f"{_noise(count, draw)} {text}"


def _anywhere(text: str, count: int, draw: random.Random) -> str:
    place = draw.randint(0, len(text))
    return text[:place] + _noise(count, draw) + text[place:]


def _insert(text: str, count: int, draw: random.Random) -> str:
    for place in sorted(draw.choices(range(len(text) + 1), k=count), reverse=True):
        text = text[:place] + draw.choice(CHARACTERS) + text[place:]
    return text


def _delete(text: str, count: int, draw: random.Random) -> str:
    gone = set(draw.sample(range(len(text)), count))
    return "".join(character for place, character in enumerate(text) if place not in gone)


def _substitute(text: str, count: int, draw: random.Random) -> str:
    changed = list(text)
    for place in draw.sample(range(len(text)), count):
        changed[place] = draw.choice(CHARACTERS.replace(changed[place], ""))
    return "".join(changed)


STRINGS: dict[str, Change] = {"suffix": _suffix, "prefix": _prefix, "anywhere": _anywhere}
SINGLE: dict[str, Change] = {"insert": _insert, "delete": _delete, "substitute": _substitute}
KINDS = (*STRINGS, *SINGLE)


def augmented(text: str, kind: str, strength: float, length: int, draw: random.Random) -> str:
    """`strength` is the share of characters that are inserted, deleted or substituted, at least one; `length` how long
    an inserted string is."""
    if kind in STRINGS:
        return STRINGS[kind](text, length, draw)
    return SINGLE[kind](text, min(len(text), max(1, round(strength * len(text)))), draw)
