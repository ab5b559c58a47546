"""The language's grammar as Lark for llguidance, so that a model writes programs and nothing else.

Built for a question, it holds only the names that the question's anchors allow: a program over it can name nothing that
the graph does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moesaic.know.language.program import (
    AGGREGATES,
    ARITHMETIC,
    COMPARED,
    DATED,
    EXTREMES,
    bracketed,
)
from moesaic.serve.core.grammars.lark import quoted

# One space between words: a model spends no tokens on layout, and what it writes is the form it was trained on. The
# lexer takes the longest literal and never goes back, so none is the beginning of another that could go on otherwise.
RULES = """
start: "what is " set | "how many are " set | "compute " amount | "is " whether
whether: "there any " set | amount " " compared " " amount
set: name | LITERAL | "everything" | relation " of " set | "those whose " relation " " test
     | "( " set " " joined " )"
joined: "and " set | "or " set | "but not " set | "with the " extreme " " relation | "named like " TEXT
test: "is " set | "is known" | compared " " NUMBER | dated " " DATE
relation: plain | plain " where " plain " " qualified
qualified: "is " name | "is " LITERAL | compared " " NUMBER | dated " " DATE
amount: NUMBER | "the number of " set | "the " aggregate " " relation " of " set
     | "( " amount " " arithmetic " " amount " )"
LITERAL: NUMBER | DATE
NUMBER: /-?(0|[1-9][0-9]{0,14})(\\.[0-9]{1,9})?/
DATE: /[0-9]{4}-[0-9]{2}-[0-9]{2}/
TEXT: /"([^"\\\\\\n]|\\\\["\\\\nrt])*"/
"""
ANY_NAME = r"/\[([^\]\\\n]|\\[\]\\nr])+\]/"
ANY_RELATION = r"/<([^>\\\n]|\\[>\\nr])+>/"


def grammar(
    names: Iterable[str] | None = None,
    relations: Iterable[str] | None = None,
    before: str = "",
    *,
    simple: bool = False,
) -> str:
    """Programs over these names and relations, any where none are given. `before`: a rule that comes before the
    program. `simple`: without qualifiers, tests of texts, and everything, which no plain question needs."""
    rules = RULES
    if simple:
        rules = rules.replace(' | "everything"', "").replace(' | "named like " TEXT', "")
        rules = rules.replace(' | plain " where " plain " " qualified', "")
        rules = "\n".join(line for line in rules.splitlines() if not line.startswith(("qualified", "TEXT")))
    if before:
        rules = rules.replace("\nstart: ", f"\nstart: {before} program\nprogram: ", 1)
    lines = [
        rules,
        f"name: {one_of([bracketed(name, '[', ']') for name in names]) if names is not None else 'ANY_NAME'}",
        f"plain: {one_of([bracketed(name, '<', '>') for name in relations]) if relations is not None else 'ANY_PLAIN'}",
        *(f"{rule}: {one_of(list(words))}" for rule, words in WORDS.items()),
    ]
    if names is None:
        lines.append(f"ANY_NAME: {ANY_NAME}")
    if relations is None:
        lines.append(f"ANY_PLAIN: {ANY_RELATION}")
    return "\n".join(lines) + "\n"


WORDS: dict[str, Sequence[str]] = {
    "compared": tuple(COMPARED),
    "dated": tuple(DATED),
    "extreme": EXTREMES,
    "aggregate": AGGREGATES,
    "arithmetic": tuple(ARITHMETIC),
}


def one_of(texts: Sequence[str]) -> str:
    """In order and without repetition; a rule that nothing matches is one that no program can have."""
    return " | ".join(quoted(text) for text in dict.fromkeys(texts)) or '"[" /[^\\s\\S]/'
