"""Text to program: a parser by recursive descent, one function for each kind of part. An error says where it is."""

from __future__ import annotations

import datetime
import json
import re

from moesaic.errors import UserError
from moesaic.know.language.program import (
    AGGREGATES,
    ARITHMETIC,
    COMPARED,
    DATED,
    EXTREMES,
    Aggregate,
    Amount,
    Arithmetic,
    Compared,
    Compute,
    Constant,
    Everything,
    Extreme,
    HowMany,
    Is,
    IsAmount,
    IsThere,
    Joined,
    Known,
    Literal,
    Name,
    NamedLike,
    NumberOf,
    Of,
    Program,
    Qualifier,
    Relation,
    Set,
    Test,
    What,
    Whose,
)
from moesaic.know.language.values import Number, is_date, is_number, typed

TOKEN = re.compile(
    r"""\s*(?:(?P<name>\[(?:[^\]\\\n]|\\.)+\])|(?P<relation><(?:[^>\\\n]|\\.)+>)|(?P<text>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<value>-?[0-9][0-9.\-]*)|(?P<word>[()]|[a-z]+))"""
)
DEEPEST = 60  # parts within each other: more than any question has, fewer than Python's stack


class NotAProgram(UserError):
    """Text that is not in the language."""


def parse(text: str) -> Program:
    return Parser(text).program()


class Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []  # kind, text, place
        self.at, self.depth = 0, 0
        place = 0
        while text[place:].strip():
            match = TOKEN.match(text, place)
            if match is None:
                raise NotAProgram("program", f"cannot be read from here on: {text[place:].strip()[:40]!r}")
            assert match.lastgroup is not None
            self.tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            place = match.end()

    def fail(self, wanted: str) -> NotAProgram:
        rest = self.text[self.tokens[self.at][2] :] if self.at < len(self.tokens) else ""
        return NotAProgram("program", f"{wanted} is missing {f'before {rest[:40]!r}' if rest else 'at the end'}")

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, kind: str, wanted: str) -> str:
        if self.kind() != kind:
            raise self.fail(wanted)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def said(self, *words: str) -> str | None:
        """The first of these that stands here; then it is taken."""
        for word in words:
            pieces = word.split()
            if [text for _, text, _ in self.tokens[self.at : self.at + len(pieces)]] == pieces:
                self.at += len(pieces)
                return word
        return None

    def must(self, *words: str) -> str:
        found = self.said(*words)
        if found is None:
            raise self.fail(" or ".join(f'"{word}"' for word in words))
        return found

    def program(self) -> Program:
        found: Program
        if self.said("what is"):
            found = What(self.set())
        elif self.said("how many are"):
            found = HowMany(self.set())
        elif self.said("is there any"):
            found = IsThere(self.set())
        elif self.said("compute"):
            found = Compute(self.amount())
        else:
            self.must("is", "what is", "how many are", "is there any", "compute")
            found = IsAmount(self.amount(), self.must(*COMPARED), self.amount())
        if self.at < len(self.tokens):
            raise self.fail("the end of the program")
        return found

    def set(self) -> Set:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotAProgram("program", f"has more than {DEEPEST} parts within each other")
        try:
            return self._set()
        finally:
            self.depth -= 1

    def _set(self) -> Set:
        if self.kind() == "name":
            return Name(unbracketed(self.take("name", "a name")))
        if self.kind() == "value":
            return Literal(self.literal())
        if self.kind() == "relation":
            relation = self.relation()
            self.must("of")
            return Of(relation, self.set())
        if self.said("everything"):
            return Everything()
        if self.said("those whose"):
            return Whose(self.relation(), self.test())
        if self.said("("):
            found = self.joined(self.set())
            self.must(")")
            return found
        raise self.fail("a set: a [name], a <relation> of ..., those whose ..., ( ... )")

    def joined(self, left: Set) -> Set:
        word = self.must("and", "or", "but not", "with the", "named like")
        if word == "with the":
            return Extreme(left, self.must(*EXTREMES), self.relation())
        if word == "named like":
            text = self.take("text", "a quoted text")
            try:
                return NamedLike(left, json.loads(text))
            except ValueError:
                raise NotAProgram("program", f"{text[:40]} is no text in JSON's form") from None
        assert word in ("and", "or", "but not")
        return Joined(left, word, self.set())  # type: ignore[arg-type]  # as asserted

    def relation(self) -> Relation:
        name = unbracketed(self.take("relation", "a <relation>"))
        if not self.said("where"):
            return Relation(name)
        qualifier = unbracketed(self.take("relation", "a <qualifier>"))
        if not self.said("is"):
            return Relation(name, Qualifier(qualifier, self.compared()))
        if self.kind() == "name":
            return Relation(name, Qualifier(qualifier, Is(Name(unbracketed(self.take("name", "a name"))))))
        return Relation(name, Qualifier(qualifier, Is(Literal(self.literal()))))

    def test(self) -> Test:
        if self.said("is known"):
            return Known()
        return Is(self.set()) if self.said("is") else self.compared()

    def compared(self) -> Compared:
        word = self.must(*COMPARED, *DATED, "is")
        value = self.literal()
        if is_date(value) != (word in DATED):
            raise NotAProgram("program", f'"{word}" is for {"dates" if word in DATED else "numbers"}, not {value}')
        return Compared(word, value)

    def literal(self) -> Number | datetime.date:
        text = self.take("value", "a number or a date")
        value = typed(text)
        if isinstance(value, str):
            raise NotAProgram("program", f"{text} is neither a number nor a date")
        return value

    def amount(self) -> Amount:
        self.depth += 1
        if self.depth > DEEPEST:
            raise NotAProgram("program", f"has more than {DEEPEST} parts within each other")
        try:
            return self._amount()
        finally:
            self.depth -= 1

    def _amount(self) -> Amount:
        if self.kind() == "value":
            value = self.literal()
            if not is_number(value):
                raise NotAProgram("program", f"{value} is not a number")
            assert not isinstance(value, datetime.date)
            return Constant(value)
        if self.said("("):
            found = Arithmetic(self.amount(), self.must(*ARITHMETIC), self.amount())
            self.must(")")
            return found
        self.must("the")
        if self.said("number of"):
            return NumberOf(self.set())
        word = self.must(*AGGREGATES)
        relation = self.relation()
        self.must("of")
        return Aggregate(word, relation, self.set())


def unbracketed(token: str) -> str:
    plain = {"n": "\n", "r": "\r"}
    return re.sub(r"\\(.)", lambda match: plain.get(match[1], match[1]), token[1:-1])
