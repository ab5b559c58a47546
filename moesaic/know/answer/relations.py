"""Who did what to whom: whether the two sides of a relation word stand the other way round than in the source.

"Curie taught Langevin" and "Langevin taught Curie" have the same words. For each relation word of a statement, the
nearest name on its left and those that follow are looked up around the same word in the source. Turned around are those
of which the source has the opposite and nowhere the same; a passive ("was taught by") is the active turned around.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from moesaic.know.answer.claims import PRONOUNS, WITHIN_NAMES, Token, folded

Side = frozenset[str]
# Between sides that may change places.
EITHER_WAY = frozenset(["marri", "meet", "met", "between", "along", "togeth", "versu", "against"])


def turned_around(said: Sequence[Token], source: Sequence[Token], subject: tuple[str, ...] = ()) -> str | None:
    """A relation word whose sides changed places. `subject` is whom a pronoun at the source's beginning stands for."""
    names = {t.norm for t in said if t.kind == "name"} | {t.norm for t in source if t.kind == "name"}
    if len(names) < 2:
        return beside_each_other(said, source)
    # What begins a sentence may be a name that the other side has within one.
    said, source = with_first_name(said, names), with_first_name(source, names)
    for place, token in enumerate(said):
        if token.kind != "word" or token.norm in EITHER_WAY:
            continue
        around = [at for at, other in enumerate(source) if other.norm == token.norm and other.kind == "word"]
        subjects, objects = names_before(said, place)[-1:], names_after(said, place)
        for left, right in ((a - b, b - a) for a in subjects for b in objects):
            # What both have is no difference: "Air Seychelles" and "the Republic of Seychelles".
            if not left or not right:
                continue
            same = any(on_side(source, at, -1, left, subject) and on_side(source, at, 1, right) for at in around)
            turned = [at for at in around if on_side(source, at, -1, right, subject) and on_side(source, at, 1, left)]
            if not same and turned and all(passive(said, place) == passive(source, at) for at in turned):
                return token.text
    return beside_each_other(said, source)


def beside_each_other(said: Sequence[Token], source: Sequence[Token]) -> str | None:
    """The same of any three words that follow each other, as in "radium discovered Curie"."""
    ours = [token for token in said if token.kind != "function"]
    theirs = [token for token in source if token.kind != "function"]
    orders = {(a.norm, b.norm, c.norm) for a, b, c in zip(theirs, theirs[1:], theirs[2:])}
    for left, middle, right in zip(ours, ours[1:], ours[2:]):
        if middle.kind != "word" or middle.norm in EITHER_WAY or left.stretch != right.stretch:
            continue
        sides = name_or_word(ours, left), name_or_word(ours, right)
        if len({left.norm, middle.norm, right.norm}) < 3 or any(
            (a, middle.norm, b) in orders for a in sides[0] for b in sides[1]
        ):
            continue
        turned = any((b, middle.norm, a) in orders for a in sides[0] for b in sides[1])
        place = next(at for at, token in enumerate(source) if token.norm == middle.norm) if turned else 0
        if turned and passive(said, said.index(middle)) == passive(source, place):
            return middle.text
    return None


def name_or_word(tokens: Sequence[Token], one: Token) -> Side:
    return frozenset(t.norm for t in tokens if t.run == one.run) if one.kind == "name" else frozenset((one.norm,))


def with_first_name(tokens: Sequence[Token], names: set[str]) -> list[Token]:
    if not tokens or tokens[0].kind != "word" or not tokens[0].text[0].isupper() or tokens[0].norm not in names:
        return list(tokens)
    following = next((t for t in tokens[1:3] if t.norm not in WITHIN_NAMES), None)
    run = following.run if following is not None and following.kind == "name" else 0
    return [replace(tokens[0], kind="name", run=run), *tokens[1:]]


def names_before(tokens: Sequence[Token], place: int) -> list[Side]:
    return runs(token for token in tokens[:place] if token.kind == "name")


def names_after(tokens: Sequence[Token], place: int) -> list[Side]:
    """Up to the next mark: a subject may be further away than that, an object not."""
    after = tokens[place + 1 :]
    return runs(token for token in after if token.kind == "name" and token.stretch == tokens[place].stretch)


def runs(names: Iterable[Token]) -> list[Side]:
    found: dict[int, set[str]] = {}
    for token in names:
        found.setdefault(token.run, set()).add(token.norm)
    return [frozenset(name) for name in found.values()]


def on_side(tokens: Sequence[Token], place: int, step: int, name: Side, subject: tuple[str, ...] = ()) -> bool:
    beside = tokens[place + 1 :] if step > 0 else tokens[:place]
    if any(token.norm in name for token in beside if token.kind == "name"):
        return True
    return bool(name & set(subject)) and any(folded(token.text) in PRONOUNS for token in beside[:2])


def passive(tokens: Sequence[Token], place: int) -> bool:
    return any(folded(token.text) == "by" for token in tokens[place + 1 : place + 3])
