"""GBNF and EBNF: a grammar accepts the texts that its rules derive, and no others, whatever became lexemes."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from moesaic.errors import UserError
from moesaic.serve.core.grammars.gbnf import gbnf_to_lark, is_gbnf

BYTES = LLTokenizer("byte")


@lru_cache(maxsize=1)
def compiled(lark: str) -> LLMatcher:
    matcher = LLMatcher(BYTES, lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def accepts(lark: str, text: str) -> bool:
    matcher = compiled(lark).deep_copy()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def check(gbnf: str, good: list[str], bad: list[str]) -> None:
    lark = gbnf_to_lark(gbnf, "grammar")
    assert [text for text in good if not accepts(lark, text)] == []
    assert [text for text in bad if accepts(lark, text)] == []


# Grammars as trees: how they are written, and what they derive, found without any parser: the sets of texts of at most
# so many letters, made larger until nothing is added.

LONGEST = 4
Tree = tuple[Any, ...]
TREES = st.recursive(
    st.sampled_from(["a", "b", "ab", "ba", ""]).map(lambda text: ("text", text))
    | st.sampled_from(["[ab]", "[^b]"]).map(lambda chars: ("class", chars))
    | st.sampled_from(["root", "x", "y"]).map(lambda name: ("rule", name)),
    lambda inner: (
        st.tuples(st.just("all"), st.lists(inner, min_size=1, max_size=3))
        | st.tuples(st.just("one"), st.lists(inner, min_size=2, max_size=3))
        | st.tuples(st.just("again"), inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}"]))
    ),
    max_leaves=5,
)


def written(tree: Tree) -> str:
    match tree:
        case "text", text:
            return f'"{text}"'
        case (("class" | "rule"), text):
            return text
        case "all", parts:
            return "(" + " ".join(written(part) for part in parts) + ")"
        case "one", parts:
            return "(" + " | ".join(written(part) for part in parts) + ")"
        case "again", inner, count:
            return f"({written(inner)}){count}"
    raise AssertionError(tree)


def joined(one: set[str], other: set[str]) -> set[str]:
    return {a + b for a in one for b in other if len(a + b) <= LONGEST}


def derived(tree: Tree, rules: dict[str, set[str]]) -> set[str]:
    match tree:
        case "text", text:
            return {text}
        case "class", chars:
            return {"a", "b"} if chars == "[ab]" else {"a"}  # of the letters that the texts are made of
        case "rule", name:
            return rules[name]
        case "all", parts:
            found = {""}
            for part in parts:
                found = joined(found, derived(part, rules))
            return found
        case "one", parts:
            return set().union(*(derived(part, rules) for part in parts))
        case "again", inner, count:
            least, most = {"*": (0, 9), "+": (1, 9), "?": (0, 1), "{2}": (2, 2), "{1,2}": (1, 2), "{2,}": (2, 9)}[count]
            times = [{""}]
            for _ in range(most):
                times.append(joined(times[-1], derived(inner, rules)))
            return set().union(*times[least:])
    raise AssertionError(tree)


def language(trees: dict[str, Tree]) -> set[str]:
    rules: dict[str, set[str]] = {name: set() for name in trees}
    while True:
        larger = {name: derived(tree, rules) for name, tree in trees.items()}
        if larger == rules:
            return rules["root"]
        rules = larger


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries({"root": TREES, "x": TREES, "y": TREES}))
def test_a_grammar_accepts_what_its_rules_derive(trees: dict[str, Tree]) -> None:
    texts = language(trees)
    try:
        lark = gbnf_to_lark("\n".join(f"{name} ::= {written(tree)}" for name, tree in trees.items()), "grammar")
    except UserError as error:
        assert "no text" in error.problem and not texts
        return
    for length in range(LONGEST + 1):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert accepts(lark, text) == (text in texts), (lark, text)


@pytest.mark.parametrize(
    ("gbnf", "good", "bad"),
    [
        ('root ::= "yes" | "no" # or', ["yes", "no"], ["maybe", "yesno", ""]),
        ("root ::= [^a-c\\n]+", ["xyz", "é"], ["xa", "x\n", ""]),
        (r'root ::= "\"\x41\u00e9\U0001F600\t"', ['"Aé😀\t'], ["A"]),
        (r"root ::= [\]\-x]{2,3}", ["]-", "x]x"], ["]", "a"]),
        ('root ::= ("a" |\n  "b")*\n  "c"', ["c", "abc"], ["ab"]),
        ("root ::= . .", ["ab", "\né"], ["a"]),
        ('root ::= x\nx ::= [a-z]+ y\ny ::= "b" x | "c"', ["abc", "azbfc"], ["ab", "c"]),
        (
            'root ::= expr\nexpr ::= term ([-+] term)*\nterm ::= [0-9]+ | "(" expr ")"',
            ["1+(2-3)", "((7))"],
            ["1+", "()"],
        ),
        ('ws ::= ([ \\t] ws)?\nroot ::= "{" ws root? "}" ws', ["{ {} } "], ["{ ", "{}}"]),
    ],
)
def test_what_grammars_are_written_with(gbnf: str, good: list[str], bad: list[str]) -> None:
    assert is_gbnf(gbnf)
    check(gbnf, good, bad)


@pytest.mark.parametrize(
    "gbnf",
    [
        *(
            "",
            'root = "a"',
            'start ::= "a"',
            'root ::= "a',
            "root ::= [a",
            "root ::= (a",
            "root ::= x",
            "root ::= [z-a]",
        ),
        *('root ::= "a"{3,2}', r'root ::= "\q"', 'root ::= "a"\nroot ::= "b"', 'root ::= "a" (= "b")', "root ::= []"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_said(gbnf: str) -> None:
    with pytest.raises(UserError) as refused:
        gbnf_to_lark(gbnf, "grammar")
    assert refused.value.place == "grammar"
