"""A grammar over characters as llguidance's Lark, which has lexemes: texts that a lexer matches as far as they go,
before the parser sees them.

Whatever is regular could be one lexeme, and the fewer lexemes, the faster the masks. But a lexer is greedy: in
`[a-z]+ "c"` it takes the c for one of the letters and finds no end. So regular parts become lexemes, and those of which
some match could be taken for the beginning of a longer one, with something that may follow it, are taken apart, if need
be down to single characters, which no lexer can get wrong. Recursion is left to the parser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.serve.core.grammars.expressions import (
    EMPTY,
    Chars,
    Choice,
    Expression,
    Lexeme,
    Repeat,
    Rule,
    Sequence,
    Sizes,
    Token,
    in_regex,
    inside,
    shortest,
    written_out,
)

WHOLE = 20_000  # characters' places of a grammar that is one regular expression
LEXEME = 256  # of one that must be compared with others
MAX_RULES = 3000
MAX_SHORTEST = 100_000  # characters of the shortest text
MAX_LEXEMES = 300  # to compare with each other
MAX_STEPS = 100_000  # of comparing them, and of finding what follows them
ROUNDS = 40
Ranges = tuple[tuple[int, int], ...]


def lark_of(rules: Mapping[str, Expression], start: str, place: str) -> str:
    if len(rules) > MAX_RULES:
        raise UserError(place, f"has more than {MAX_RULES} rules", "Make it simpler.")
    length = shortest(rules, start)
    if length is None:
        raise UserError(place, "no text satisfies it", "Correct it.")
    if length > MAX_SHORTEST:
        raise UserError(place, f"allows no text of less than {MAX_SHORTEST} characters", "Make it simpler.")
    sizes = Sizes(rules)
    size = sizes.known.get(start)
    if size is not None and size <= WHOLE:
        return f"start: T\nT: /{in_regex(written_out(rules[start], rules))}/"
    apart: set[Expression] = set()
    for _ in range(ROUNDS):
        split = Split(rules, sizes, apart)
        confused = split.confused()
        if confused is None:  # too much to compare
            break
        if not confused:
            return split.lark(start)
        apart |= confused
    return Split(rules, sizes, None).lark(start)


class Split:
    """The rules with their regular parts as lexemes, but for those that are to be `apart` (None: all)."""

    def __init__(self, rules: Mapping[str, Expression], sizes: Sizes, apart: set[Expression] | None) -> None:
        self.source, self.sizes, self.apart = rules, sizes, apart
        self.lexemes: list[Expression] = []
        self.numbers: dict[Expression, int] = {}
        self.rules: dict[str, Expression] = {name: self._split(rule) for name, rule in rules.items()}

    def _split(self, expression: Expression) -> Expression:
        if isinstance(expression, Chars) or (found := self._lexeme(expression)) is None:
            match expression:
                case Chars():
                    return self._numbered(expression)
                case Sequence(parts):
                    return _grouped(
                        [self._split(run[0] if len(run) == 1 else Sequence(run)) for run in self._runs(parts)]
                    )
                case Choice(options):
                    return Choice(tuple(self._split(option) for option in options))
                case Repeat(inner, least, most):
                    return Repeat(self._split(inner), least, most)
            return expression
        return found

    def _runs(self, parts: tuple[Expression, ...]) -> Iterator[tuple[Expression, ...]]:
        """The parts of a sequence, regular neighbours together; halves of what may not stay so."""
        run: list[Expression] = []
        total = 0
        for part in parts:
            size = self.sizes.of(part)
            if size is None or total + size > LEXEME:
                yield from self._halves(run)
                run, total = [], 0
            if size is None or size > LEXEME:
                yield (part,)
            else:
                run.append(part)
                total += size
        yield from self._halves(run)

    def _halves(self, run: list[Expression]) -> Iterator[tuple[Expression, ...]]:
        if len(run) <= 1 or self._lexeme(Sequence(tuple(run))) is not None:
            if run:
                yield tuple(run)
        else:
            yield from self._halves(run[: len(run) // 2])
            yield from self._halves(run[len(run) // 2 :])

    def _lexeme(self, expression: Expression) -> Lexeme | None:
        size = self.sizes.of(expression)
        if size is None or size > LEXEME or self.apart is None:
            return None
        if isinstance(expression, Sequence) and len(expression.parts) == 1:
            expression = expression.parts[0]
        whole = written_out(expression, self.source)
        return None if whole in self.apart or whole == EMPTY else self._numbered(whole)

    def _numbered(self, expression: Expression) -> Lexeme:
        number = self.numbers.setdefault(expression, len(self.lexemes))
        if number == len(self.lexemes):
            self.lexemes.append(expression)
        return Lexeme(number)

    def confused(self) -> set[Expression] | None:
        """Lexemes that a greedy lexer would get wrong; None if there are too many to tell."""
        if len(self.lexemes) > MAX_LEXEMES:
            return None
        machines = [Machine.of(lexeme) for lexeme in self.lexemes]
        try:
            follow = Follow(self.rules, machines).lexemes
        except TooMuch:
            return None
        steps, found = 0, set[Expression]()
        for one, first in enumerate(machines):
            after = _union([machines[each].begins for each in _bits(follow[one])])
            for other, second in enumerate(machines):
                if second.single or not _meet(first.begins, second.begins):
                    continue
                wrong, cost = first.is_cut_short(second, after)
                steps += cost
                if steps > MAX_STEPS:
                    return None
                if wrong:
                    found |= {self.lexemes[each] for each in (one, other) if not machines[each].single}
        return found

    def lark(self, start: str) -> str:
        names = {name: f"r{number}" for number, name in enumerate(self.rules)}
        lines = [f"start: {names[start]}"]
        lines += [f"{names[name]}: {_written(rule, names)}" for name, rule in self.rules.items()]
        lines += [f"T{number}: /{in_regex(lexeme)}/" for number, lexeme in enumerate(self.lexemes)]
        return "\n".join(lines)


def _grouped(parts: list[Expression]) -> Expression:
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Sequence) else [part]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _written(part: Expression, names: Mapping[str, str]) -> str:
    match part:
        case Lexeme(number):
            return f"T{number}"
        case Rule(name):
            return names[name]
        case Token(text):
            return text
        case Choice(options):
            return "(" + " | ".join(_written(option, names) for option in options) + ")"
        case Repeat(inner, least, most):
            body = f"({_written(inner, names)})"
            usual = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            return body + (usual or f"{{{least},{'' if most is None else most}}}")
        case Sequence(parts):
            return " ".join(_written(each, names) for each in parts) or '""'
    raise AssertionError(part)


# What may follow a lexeme. Sets of lexemes are numbers, one bit for each.


class TooMuch(Exception):
    pass


class Follow:
    def __init__(self, rules: Mapping[str, Expression], machines: list[Machine]) -> None:
        self.machines = machines
        self.steps = 0
        self.first: dict[str, int] = dict.fromkeys(rules, 0)
        self.empty: dict[str, bool] = dict.fromkeys(rules, False)
        changed = True
        while changed:
            changed = False
            for name, rule in rules.items():
                found = self._starts(rule)
                if found != (self.first[name], self.empty[name]):
                    self.first[name], self.empty[name] = found
                    changed = True
        self.after: dict[str, int] = dict.fromkeys(rules, 0)  # of rules
        self.lexemes = [0] * len(machines)
        self.changed = True
        while self.changed:
            self.changed = False
            for name, rule in rules.items():
                self._visit(rule, self.after[name])

    def _starts(self, part: Expression) -> tuple[int, bool]:
        """With what it may begin, and whether it may be empty."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooMuch
        match part:
            case Lexeme(number):
                return 1 << number, self.machines[number].empty
            case Rule(name):
                return self.first[name], self.empty[name]
            case Token():
                return 0, False
            case Sequence(parts):
                first = 0
                for each in parts:
                    more, empty = self._starts(each)
                    first |= more
                    if not empty:
                        return first, False
                return first, True
            case Choice(options):
                all_ = [self._starts(option) for option in options]
                first = 0
                for more, _ in all_:
                    first |= more
                return first, any(empty for _, empty in all_)
            case Repeat(inner, least, _):
                first, empty = self._starts(inner)
                return first, empty or least == 0
        raise AssertionError(part)

    def _visit(self, part: Expression, after: int) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TooMuch
        match part:
            case Lexeme(number):
                self.lexemes[number] |= after
            case Rule(name):
                if after & ~self.after[name]:
                    self.after[name] |= after
                    self.changed = True
            case Repeat(inner, _, most):
                self._visit(inner, after | self._starts(inner)[0] if most != 1 else after)
            case Sequence(parts):
                for each in reversed(parts):
                    self._visit(each, after)
                    first, empty = self._starts(each)
                    after = first | after if empty else first
            case Choice(options):
                for option in options:
                    self._visit(option, after)


# The automaton of a lexeme


@dataclass
class Machine:
    """Its states are the characters' places in the expression; `next` are the places after each."""

    ranges: list[Ranges] = field(default_factory=list)
    next: list[set[int]] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    empty: bool = True

    @classmethod
    def of(cls, expression: Expression) -> Machine:
        machine = cls()
        machine.first, machine.last, machine.empty = machine._add(expression)
        return machine

    @property
    def single(self) -> bool:
        return len(self.ranges) == 1 and not self.next[0]

    @property
    def begins(self) -> Ranges:
        return _union([self.ranges[place] for place in self.first])

    def _add(self, expression: Expression) -> tuple[set[int], set[int], bool]:
        match expression:
            case Chars(ranges):
                self.ranges.append(ranges)
                self.next.append(set())
                place = len(self.ranges) - 1
                return {place}, {place}, False
            case Choice():
                found = [self._add(option) for option in inside(expression)]
                return (
                    set().union(*(first for first, _, _ in found)),
                    set().union(*(last for _, last, _ in found)),
                    any(empty for _, _, empty in found),
                )
            case Repeat(inner, least, most):
                return self._repeat(inner, least, most)
        return self._chain([self._add(part) for part in inside(expression)])

    def _repeat(self, inner: Expression, least: int, most: int | None) -> tuple[set[int], set[int], bool]:
        """A bounded number of times is taken for an unbounded one: what matches more is at worst found to be wrong
        where it is not."""
        first, last, empty = self._add(inner)
        if most == 1:
            return first, last, empty or least == 0
        copies = [(first, last, empty or least == 0)]
        if least > 1:
            copies.append(self._add(inner))
        first, last, _ = copies[-1]
        for place in last:
            self.next[place] |= first
        return self._chain(copies)

    def _chain(self, parts: list[tuple[set[int], set[int], bool]]) -> tuple[set[int], set[int], bool]:
        first, last, empty = set[int](), set[int](), True
        for begins, ends, may_be_empty in parts:
            for place in last:
                self.next[place] |= begins
            first = first | begins if empty else first
            last = last | ends if may_be_empty else ends
            empty = empty and may_be_empty
        return first, last, empty

    def is_cut_short(self, other: Machine, after: Ranges) -> tuple[bool, int]:
        """Whether a match of this one, and then a character that may come `after` it, is also the beginning of a match
        of the other; and what it cost to find out."""
        waiting = [(mine, its) for mine in self.first for its in other.first]
        seen = set[tuple[int, int]]()
        steps = 0
        while waiting:
            pair = waiting.pop()
            steps += 1
            if pair in seen or not _meet(self.ranges[pair[0]], other.ranges[pair[1]]):
                continue
            if steps > MAX_STEPS:
                break
            seen.add(pair)
            mine, its = pair
            if mine in self.last and any(_meet(other.ranges[place], after) for place in other.next[its]):
                return True, steps
            for mine_next in self.next[mine]:
                waiting += [step for its_next in other.next[its] if (step := (mine_next, its_next)) not in seen]
        return False, steps


def _bits(number: int) -> Iterator[int]:
    place = 0
    while number:
        if number & 1:
            yield place
        number >>= 1
        place += 1


def _union(all_: list[Ranges]) -> Ranges:
    return tuple(sorted({each for ranges in all_ for each in ranges}))


def _meet(one: Ranges, other: Ranges) -> bool:
    return any(low <= last and first <= high for low, high in one for first, last in other)
