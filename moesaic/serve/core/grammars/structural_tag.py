"""Structural tags, as vLLM, SGLang and xgrammar take them: free text in which tags hold content of a form.

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}]}
    {"type": "structural_tag", "format": {"type": "sequence", "elements": [...]}}

The newer way is a tree of formats: constant strings, JSON schemas, regular expressions and grammars, free text;
sequences, alternatives and repetitions of them; and tags, one after another, or wherever a trigger comes in free text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from moesaic.errors import UserError
from moesaic.serve.core.grammars.gbnf import gbnf_to_lark, is_gbnf
from moesaic.serve.core.grammars.lark import ANY, Rules, quoted, regex_parts

MAX_DEPTH = 40
MAX_FORMATS = 500
MAX_REPEATS = 10_000
NOT_OFFERED = ("dispatch", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch")


def structural_tag_rules(tag: Mapping[str, Any], place: str, special: Mapping[str, int]) -> tuple[Rules, str]:
    """The rules, and the expression they begin with."""
    reader = _Formats(place, special)
    if tag.get("format") is not None:
        return reader.rules, reader.format(tag["format"], f"{place}.format")
    if not isinstance(tag.get("structures"), list) or not isinstance(tag.get("triggers"), list):
        raise UserError(place, "must have a format, or structures and triggers")
    tags = []
    for number, structure in enumerate(tag["structures"]):
        if not isinstance(structure, dict):
            raise UserError(f"{place}.structures.{number}", "is not an object")
        content = {"type": "json_schema", "json_schema": structure.get("schema") or {"type": "object"}}
        tags.append({"begin": structure.get("begin"), "content": content, "end": structure.get("end")})
    return reader.rules, reader.triggered({"triggers": tag["triggers"], "tags": tags}, place, "structures")


class _Formats:
    def __init__(self, place: str, special: Mapping[str, int]) -> None:
        self.place = place
        self.rules = Rules(special)
        self.count = 0

    def format(self, given: Any, place: str, end: tuple[str, ...] = (), depth: int = 0) -> str:
        """The expression of a format, which comes before one of the `end`s."""
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_FORMATS:
            raise UserError(self.place, "has too many formats within each other", "Make it simpler.")
        if not isinstance(given, dict) or not isinstance(given.get("type"), str):
            raise UserError(place, "must be an object with a type")
        kind = given["type"]
        if kind in NOT_OFFERED:
            raise UserError(f"{place}.type", f"{kind} is not supported", "Use triggered_tags or a grammar.")
        makers: dict[str, Callable[[dict[str, Any], str, tuple[str, ...], int], str]] = {
            "const_string": self._constant,
            "json_schema": self._schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "token": self._token,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._repeated,
            "plus": self._repeated,
            "star": self._repeated,
            "repeat": self._repeated,
            "tag": self._tag,
            "triggered_tags": lambda given, place, end, depth: self.triggered(given, place, "tags", end, depth),
            "tags_with_separator": self._separated,
        }
        if kind not in makers:
            raise UserError(f"{place}.type", f"there is no {kind!r}", f"There are {', '.join(makers)}.")
        return makers[kind](given, place, end, depth)

    def _constant(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        return self.rules.literal(_text(given, "value", place))

    def _schema(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        if given.get("style", "json") != "json":
            raise UserError(f"{place}.style", "only json is supported", "Give tools, which are in the model's style.")
        if given.get("any_order"):
            raise UserError(f"{place}.any_order", "is not supported", "Properties come in the schema's order.")
        schema = given.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise UserError(f"{place}.json_schema", "is not a JSON schema")
        return self.rules.schema(schema, f"{place}.json_schema")

    def _regex(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        pattern = _text(given, "pattern", place)
        return self.rules.grammar(regex_parts(pattern))

    def _grammar(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        text = _text(given, "grammar", place)
        lark = gbnf_to_lark(text, f"{place}.grammar") if is_gbnf(text) else text
        return self.rules.grammar([{"lark_grammar": lark}])

    def _any_text(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        for name in ("max_tokens", "max_chars"):
            if given.get(name) is not None:
                raise UserError(f"{place}.{name}", "is not supported", "Leave it out.")
        excluded = _texts(given.get("excludes") or [], f"{place}.excludes")
        return self.rules.without(*excluded) if excluded else self.rules.rule(ANY)

    def _token(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        token = given.get("token")
        if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
            return f"<[{token}]>"
        if isinstance(token, str) and token in self.rules.special:
            return self.rules.literal(token)
        raise UserError(f"{place}.token", "is neither a token's number nor a special token of this model")

    def _sequence(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        elements = _list(given, "elements", place)
        found, number = [], 0
        while number < len(elements):
            each, after = elements[number], elements[number + 1] if number + 1 < len(elements) else None
            where = f"{place}.elements.{number}"
            # Free text ends where the constant after it begins.
            if _is(each, "any_text") and not each.get("excludes") and _is(after, "const_string") and after.get("value"):
                found.append(self.rules.until(_text(after, "value", where)))
                number += 2
                continue
            found.append(self.format(each, where, end, depth + 1))
            number += 1
        return "(" + " ".join(found) + ")"

    def _or(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        elements = _list(given, "elements", place)
        found = [self.format(each, f"{place}.elements.{i}", end, depth + 1) for i, each in enumerate(elements)]
        return "(" + " | ".join(found) + ")"

    def _repeated(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        inner = self.format(given.get("content"), f"{place}.content", end, depth + 1)
        if given["type"] != "repeat":
            return f"({inner})" + {"optional": "?", "plus": "+", "star": "*"}[given["type"]]
        least, most = (value if isinstance(value := given.get(name), int) else -2 for name in ("min", "max"))
        if not 0 <= least <= MAX_REPEATS or not (most == -1 or least <= most <= MAX_REPEATS):
            raise UserError(place, f"min and max must be numbers up to {MAX_REPEATS}, or max -1")
        return f"({inner}){{{least},{'' if most == -1 else most}}}"

    def _tag(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        begin = given.get("begin")
        if _is(begin, "token"):
            head = self._token(begin, f"{place}.begin", (), depth)
        else:
            head = self.rules.literal(_text(given, "begin", place))
        return f"({head} {self._body(given, place, depth)})"

    def _body(self, given: dict[str, Any], place: str, depth: int) -> str:
        """A tag's content and its end."""
        content, end = given.get("content"), given.get("end")
        if _is(end, "token"):
            ending = self._token(end, f"{place}.end", (), depth)
            return f"{self.format(content, f'{place}.content', (), depth + 1)} {ending}"
        ends = tuple(_texts(end if isinstance(end, list) else [end], f"{place}.end"))
        if not ends:
            raise UserError(f"{place}.end", "is empty")
        if _is(content, "any_text") and all(ends):
            excluded = _texts(content.get("excludes") or [], f"{place}.content.excludes")
            self._any_text({**content, "excludes": None}, f"{place}.content", (), depth)
            if not set(excluded) - set(ends):
                return self.rules.until(*ends)
        inner = self.format(content, f"{place}.content", ends, depth + 1)
        return f"{inner} ({' | '.join(self.rules.literal(each) for each in ends)})"

    def triggered(self, given: dict[str, Any], place: str, name: str, end: tuple[str, ...] = (), depth: int = 0) -> str:
        """Free text; where one of the triggers comes in it, one of the tags that begin with it."""
        triggers = _texts(_list(given, "triggers", place), f"{place}.triggers")
        excludes = _texts(given.get("excludes") or [], f"{place}.excludes")
        heads: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        at_once: list[str] = []
        for number, tag in enumerate(_list(given, "tags", place)):
            where = f"{place}.{name}.{number}"
            if not isinstance(tag, dict):
                raise UserError(where, "is not an object")
            begin = _text(tag, "begin", where)
            mine = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
            if not mine:
                raise UserError(f"{where}.begin", "begins with none of the triggers")
            body = self._body(tag, where, depth + 1)
            heads[mine[0]].append(f"{self.rules.literal(begin[len(mine[0]) :])} {body}")
            at_once.append(f"{self.rules.literal(begin)} {body}")
        first = self.rules.rule(" | ".join(at_once))
        calls = [f"{self.rules.until(trigger)} ({' | '.join(rest)})" for trigger, rest in heads.items() if rest]
        call = self.rules.rule(" | ".join(calls))
        text = self.rules.without(*triggers, *excludes, *end)
        if given.get("stop_after_first"):
            return first if given.get("at_least_one") else f"({call} | {text})"
        return f"({first} ({call})* {text})" if given.get("at_least_one") else f"(({call})* {text})"

    def _separated(self, given: dict[str, Any], place: str, end: tuple[str, ...], depth: int) -> str:
        tags = _list(given, "tags", place)
        for number, tag in enumerate(tags):
            if not isinstance(tag, dict):
                raise UserError(f"{place}.tags.{number}", "is not an object")
        found = [self._tag(tag, f"{place}.tags.{i}", (), depth + 1) for i, tag in enumerate(tags)]
        one = self.rules.rule(" | ".join(found))
        separator = self.rules.literal(_text(given, "separator", place, empty=True))
        several = one if given.get("stop_after_first") else f"({one} ({separator} {one})*)"
        return several if given.get("at_least_one") else f"({several})?"


def _is(given: Any, kind: str) -> TypeGuard[dict[str, Any]]:
    return isinstance(given, dict) and given.get("type") == kind


def _text(given: Mapping[str, Any], name: str, place: str, *, empty: bool = False) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise UserError(f"{place}.{name}", "must be a text")
    quoted(value)
    return value


def _texts(values: Any, place: str) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UserError(place, "must be a list of texts")
    return values


def _list(given: Mapping[str, Any], name: str, place: str) -> list[Any]:
    value = given.get(name)
    if not isinstance(value, list) or not value:
        raise UserError(f"{place}.{name}", "must be a list that is not empty")
    return value
