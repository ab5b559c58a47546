"""A grammar over characters, as GBNF and its kin have it: the expressions of its rules, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # no characters
MAX_SIZE = 1 << 30  # sizes above are all the same


@dataclass(frozen=True)
class Chars:
    """One character of some ranges, which are sorted and do not touch."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Sequence:
    parts: tuple[Expression, ...]


@dataclass(frozen=True)
class Choice:
    options: tuple[Expression, ...]


@dataclass(frozen=True)
class Repeat:
    inner: Expression
    least: int
    most: int | None


@dataclass(frozen=True)
class Rule:
    """Whatever the rule of this name matches."""

    name: str


@dataclass(frozen=True)
class Token:
    """One of the vocabulary's tokens, as llguidance writes it."""

    text: str


@dataclass(frozen=True)
class Lexeme:
    """Something regular, by its number."""

    number: int


Expression = Chars | Sequence | Choice | Repeat | Rule | Token | Lexeme
EMPTY = Sequence(())


def characters(ranges: Iterator[tuple[int, int]] | list[tuple[int, int]], negated: bool = False) -> Chars:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    if not negated:
        return Chars(tuple(joined))
    gaps, start = [], 0
    for low, high in [*joined, (LAST + 1, LAST + 1)]:
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return Chars(tuple(gaps))


def literal(text: str) -> Expression:
    return sequence([Chars(((ord(character), ord(character)),)) for character in text])


def sequence(parts: list[Expression]) -> Expression:
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else [part]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(options: list[Expression]) -> Expression:
    flat: list[Expression] = []
    for option in options:
        flat += option.options if isinstance(option, Choice) else [option]
    return flat[0] if len(flat) == 1 else Choice(tuple(flat))


def inside(expression: Expression) -> tuple[Expression, ...]:
    match expression:
        case Sequence(parts):
            return parts
        case Choice(options):
            return options
        case Repeat(inner):
            return (inner,)
    return ()


def rules_in(expression: Expression) -> Iterator[str]:
    waiting = [expression]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Rule):
            yield each.name
        waiting += inside(each)


def without_tail_calls(rules: Mapping[str, Expression]) -> dict[str, Expression]:
    """Rules that only repeat something by calling themselves, `ws ::= (" " ws)?`, as the repetition they are."""
    return {name: _looped(name, expression) for name, expression in rules.items()}


def _looped(name: str, expression: Expression) -> Expression:
    me = Rule(name)
    options: list[Expression] = []
    for option in expression.options if isinstance(expression, Choice) else (expression,):
        if isinstance(option, Repeat) and (option.least, option.most) == (0, 1) and name in rules_in(option):
            inner = option.inner
            options += [*(inner.options if isinstance(inner, Choice) else (inner,)), EMPTY]
        else:
            options.append(option)
    again: list[Expression] = []
    ends: list[Expression] = []
    sides: set[str] = set()
    for option in options:
        parts = option.parts if isinstance(option, Sequence) else (option,)
        if name not in rules_in(option):
            ends.append(option)
        elif parts[-1] == me and len(parts) > 1 and name not in rules_in(Sequence(parts[:-1])):
            again.append(sequence([*parts[:-1]]))
            sides.add("right")
        elif parts[0] == me and len(parts) > 1 and name not in rules_in(Sequence(parts[1:])):
            again.append(sequence([*parts[1:]]))
            sides.add("left")
        else:
            return expression
    if not again or not ends or len(sides) > 1:
        return expression
    loop, end = Repeat(choice(again), 0, None), choice(ends)
    return sequence([loop, end] if sides == {"right"} else [end, loop])


class Sizes:
    """How many characters' places an expression has with all rules written out. Recursive ones have no such size, nor
    do those with tokens: None."""

    def __init__(self, rules: Mapping[str, Expression]) -> None:
        self.rules = rules
        self.known: dict[str, int | None] = {}
        for name in _in_order(rules):
            self.known[name] = self.of(rules[name])

    def of(self, expression: Expression) -> int | None:
        match expression:
            case Chars():
                return 1
            case Token() | Lexeme():
                return None
            case Rule(name):
                return self.known.get(name)
        sizes = [self.of(part) for part in inside(expression)]
        total = 0
        for size in sizes:
            if size is None:
                return None
            total += size
        if isinstance(expression, Repeat):
            total *= max(expression.least, expression.most or 1, 1)
        return min(total + 1, MAX_SIZE)


def shortest(rules: Mapping[str, Expression], start: str) -> int | None:
    """How many characters and tokens the shortest text has that the rules derive; None if there is no text."""
    known: dict[str, int] = {}
    callers: dict[str, set[str]] = {name: set() for name in rules}
    for name, expression in rules.items():
        for called in rules_in(expression):
            callers[called].add(name)

    def least(expression: Expression) -> int | None:
        match expression:
            case Rule(name):
                return known.get(name)
            case Sequence(parts):
                lengths = [least(part) for part in parts]
                return None if None in lengths else min(MAX_SIZE, sum(length or 0 for length in lengths))
            case Choice(options):
                return min((length for option in options if (length := least(option)) is not None), default=None)
            case Repeat(inner, times, _):
                length = least(inner) if times else 0
                return None if length is None else min(MAX_SIZE, length * times)
        return 1

    waiting: dict[str, None] = dict.fromkeys(reversed([*rules]))
    while waiting:
        name = next(iter(waiting))
        del waiting[name]
        found = least(rules[name])
        if found is not None and found < known.get(name, MAX_SIZE + 1):
            known[name] = found
            waiting |= dict.fromkeys(callers[name])
    return known.get(start)


def _in_order(rules: Mapping[str, Expression]) -> list[str]:
    """Those that are not recursive, each after the rules it calls."""
    calls = {name: set(rules_in(expression)) & rules.keys() for name, expression in rules.items()}
    callers: dict[str, list[str]] = {name: [] for name in rules}
    for name, called in calls.items():
        for each in called:
            callers[each].append(name)
    left = {name: len(called) for name, called in calls.items()}
    ready = [name for name, count in left.items() if not count]
    for name in ready:
        for caller in callers[name]:
            left[caller] -= 1
            if not left[caller]:
                ready.append(caller)
    return ready


def written_out(expression: Expression, rules: Mapping[str, Expression]) -> Expression:
    """With all rules in place: of something that has a size."""
    match expression:
        case Rule(name):
            return written_out(rules[name], rules)
        case Sequence(parts):
            return sequence([written_out(part, rules) for part in parts])
        case Choice(options):
            return choice([written_out(option, rules) for option in options])
        case Repeat(inner, least, most):
            return Repeat(written_out(inner, rules), least, most)
    return expression


def in_regex(expression: Expression) -> str:
    """The regular expression of something without rules."""
    match expression:
        case Chars(ranges):
            if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
                return f"\\x{{{ranges[0][0]:x}}}"
            return "[" + "".join(_range(low, high) for low, high in ranges) + "]"
        case Sequence(parts):
            return "(?:" + "".join(map(in_regex, parts)) + ")"
        case Choice(options):
            return "(?:" + "|".join(map(in_regex, options)) + ")"
        case Repeat(inner, least, most):
            return f"(?:{in_regex(inner)}){{{least},{'' if most is None else most}}}"
    raise AssertionError(expression)


def _range(low: int, high: int) -> str:
    """Without the numbers between that are no characters."""
    before = (low, min(high, SURROGATES[0] - 1))
    after = (max(low, SURROGATES[1] + 1), high)
    return "".join(f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in (before, after) if first <= last)
