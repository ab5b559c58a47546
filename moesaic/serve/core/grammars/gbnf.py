"""GBNF, llama.cpp's notation of grammars, and xgrammar's EBNF, which SGLang and vLLM take and which has the same words:
`root ::= "yes" | [0-9]+ ("," item)*`. They are read here, and written as llguidance's Lark by `lexemes.py`."""

from __future__ import annotations

import re

from moesaic.errors import UserError
from moesaic.serve.core.grammars.expressions import (
    EMPTY,
    LAST,
    Chars,
    Expression,
    Repeat,
    Rule,
    Token,
    characters,
    choice,
    literal,
    rules_in,
    sequence,
    without_tail_calls,
)
from moesaic.serve.core.grammars.lexemes import lark_of

MAX_DEPTH = 60  # parentheses within parentheses
MAX_REPEATS = 100_000
SPACE = re.compile(r"(?:\s|#[^\n]*)+")
NAME = re.compile(r"[A-Za-z_][\w.-]*|[0-9][\w-]*")
DEFINED = re.compile(r"(?:\s|#[^\n]*)*::=")
COUNTS = re.compile(r"\{\s*(\d{1,9})?\s*(,\s*(\d{1,9})?)?\s*\}")
TOKEN = re.compile(r"!?<(\[[0-9,\s-]+\]|[^<>\s]+)>")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "e": "\x1b"}
HEX = {"x": 2, "u": 4, "U": 8}
MACROS = ("TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in this notation: Lark defines its rules with one colon."""
    return re.search(r"(?m)^\s*[\w.-]+\s*::=", text) is not None


def gbnf_to_lark(text: str, place: str) -> str:
    rules = _Reader(text, place).rules()
    if "root" not in rules:
        raise UserError(place, "has no rule `root`", "Begin with one: root ::= ...")
    for name, expression in rules.items():
        for called in rules_in(expression):
            if called not in rules:
                raise UserError(place, f"the rule {called!r}, of which {name!r} is made, is not defined")
    reached, waiting = set[str](), ["root"]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting += rules_in(rules[name])
    return lark_of(without_tail_calls({name: rule for name, rule in rules.items() if name in reached}), "root", place)


class _Reader:
    def __init__(self, text: str, place: str) -> None:
        self.text, self.place = text, place
        self.at = 0
        self.depth = 0

    def rules(self) -> dict[str, Expression]:
        rules: dict[str, Expression] = {}
        self._space()
        while self.at < len(self.text):
            name = self._match(NAME)
            if name is None or not self._match(DEFINED):
                raise self._wrong("a rule, `name ::= ...`, was expected")
            if name[0] in rules:
                raise self._wrong(f"the rule {name[0]!r} is defined twice")
            self._space()
            rules[name[0]] = self._choice()
        if not rules:
            raise UserError(self.place, "has no rules", "Begin with one: root ::= ...")
        return rules

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return choice(options)

    def _sequence(self) -> Expression:
        parts: list[Expression] = []
        self._space()
        while (part := self._item()) is not None:
            parts.append(self._repeated(part))
            self._space()
        return sequence(parts)

    def _item(self) -> Expression | None:
        character = self.text[self.at : self.at + 1]
        if character == '"':
            return literal(self._quoted('"'))
        if character == "'":
            return literal(self._quoted("'"))
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character == ".":
            self.at += 1
            return Chars(((0, LAST),))
        if character in ("<", "!"):
            return self._token()
        if name := NAME.match(self.text, self.at):
            if DEFINED.match(self.text, name.end()):
                return None  # the next rule
            if name[0] in MACROS and self.text[name.end() : name.end() + 1] == "(":
                raise self._wrong(f"{name[0]} is not supported", "Give a structural_tag.")
            self.at = name.end()
            return Rule(name[0])
        if character in ("", "|", ")"):
            return None
        raise self._wrong(f"unexpected {character!r}")

    def _repeated(self, inner: Expression) -> Expression:
        while True:
            self._space(lines=False)
            character = self.text[self.at : self.at + 1]
            if character in ("*", "+", "?") and character:
                self.at += 1
                inner = Repeat(inner, int(character == "+"), 1 if character == "?" else None)
            elif character == "{":
                counts = self._match(COUNTS)
                if counts is None:
                    raise self._wrong("a number of repetitions, like {2,5}, was expected")
                least = int(counts[1] or 0)
                most = least if counts[2] is None else int(counts[3]) if counts[3] else None
                if max(least, most or 0) > MAX_REPEATS:
                    raise self._wrong(f"more than {MAX_REPEATS} repetitions")
                if most is not None and most < least:
                    raise self._wrong("the second number is less than the first")
                inner = Repeat(inner, least, most) if most != 0 else EMPTY
            else:
                return inner

    def _group(self) -> Expression:
        if self.text.startswith("(=", self.at):
            raise self._wrong("lookahead is not supported")
        self.at += 1
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self._wrong(f"more than {MAX_DEPTH} parentheses within each other")
        found = self._choice()
        if not self._take(")"):
            raise self._wrong("a closing parenthesis is missing")
        self.depth -= 1
        return found

    def _quoted(self, end: str) -> str:
        self.at += 1
        found = []
        while not self.text.startswith(end, self.at):
            if self.at >= len(self.text) or self.text[self.at] == "\n":
                raise self._wrong("a string does not end")
            found.append(self._character())
        self.at += 1
        return "".join(found)

    def _class(self) -> Expression:
        self.at += 1
        negated = self._take("^", space=False)
        ranges: list[tuple[int, int]] = []
        while not self.text.startswith("]", self.at):
            if self.at >= len(self.text):
                raise self._wrong("a `[` has no `]`")
            low = high = ord(self._character())
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = ord(self._character())
            if high < low:
                raise self._wrong("a range of characters ends before it begins")
            ranges.append((low, high))
        self.at += 1
        if not ranges and not negated:
            raise self._wrong("a class has no characters")
        return characters(ranges, negated)

    def _token(self) -> Expression:
        found = self._match(TOKEN)
        if found is None:
            raise self._wrong("a token, like <[42]>, was expected")
        if not found[0].startswith("!"):
            return Token(found[0])
        if not found[1].startswith("["):
            raise self._wrong("only tokens given by number can be excluded")
        return Token(f"<[^{found[1][1:]}>")

    def _character(self) -> str:
        character = self.text[self.at]
        self.at += 1
        if character != "\\":
            return character
        kind = self.text[self.at : self.at + 1]
        self.at += 1
        if kind in HEX and kind:
            digits = self.text[self.at : self.at + HEX[kind]]
            if not re.fullmatch(rf"[0-9a-fA-F]{{{HEX[kind]}}}", digits) or int(digits, 16) > LAST:
                raise self._wrong(f"\\{kind} needs {HEX[kind]} hexadecimal digits")
            self.at += HEX[kind]
            return chr(int(digits, 16))
        if not kind or (kind.isalnum() and kind not in ESCAPES):
            raise self._wrong(f"unknown escape \\{kind}")
        return ESCAPES.get(kind, kind)

    def _take(self, text: str, *, space: bool = True) -> bool:
        if space:
            self._space()
        if found := self.text.startswith(text, self.at):
            self.at += len(text)
        return found

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if found := pattern.match(self.text, self.at):
            self.at = found.end()
        return found

    def _space(self, *, lines: bool = True) -> None:
        if lines:
            self._match(SPACE)
        else:
            while self.text[self.at : self.at + 1] in (" ", "\t") and self.at < len(self.text):
                self.at += 1

    def _wrong(self, problem: str, remedy: str = "Correct it.") -> UserError:
        line = self.text.count("\n", 0, self.at) + 1
        column = self.at - (self.text.rfind("\n", 0, self.at) + 1) + 1
        return UserError(self.place, f"line {line}, column {column}: {problem}", remedy)
