"""llguidance's dialect of Lark, rule by rule: literals with the tokenizer's special tokens in them, free text up to a
tag, JSON schemas, and whole grammars that others wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.core.grammars.json_schema import closed

# Between the parts of a JSON text: nothing, a space, or a new line with its indentation. In unbounded whitespace a
# small model loops for ever.
WHITESPACE = r"( |\n[ ]{0,16})?"
ANY = r"/(.|\n)*/"


class Rules:
    """The rules of a grammar as they are added. `special` tokens have no text for llguidance: where a literal holds
    one, the token itself is meant. `open`: some JSON object may have keys that no schema names."""

    def __init__(self, special: Mapping[str, int] | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.special = special or {}
        self.options = dict(options or {"whitespace_pattern": WHITESPACE})
        self.lines: list[str] = []
        self.parts: list[dict[str, Any]] = []
        self.names: dict[str, str] = {}  # by their bodies
        self.open = False

    def rule(self, body: str, attributes: str = "") -> str:
        """The name of a rule that matches this."""
        key = attributes + ":" + body
        if key not in self.names:
            name = self.names[key] = f"r{len(self.names)}"
            self.lines.append(f"{name}{attributes}: {body}")
        return self.names[key]

    def literal(self, text: str) -> str:
        if not text:
            return '""'
        known = sorted((token for token in self.special if token in text), key=len, reverse=True)
        pieces = re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]
        return " ".join(
            f"<[{self.special[piece]}]>" if piece in self.special else quoted(piece) for piece in pieces if piece
        )

    def schema(self, schema: Any, place: str, options: Mapping[str, Any] | None = None) -> str:
        found = closed(schema, place)
        self.open |= found.open
        chosen = dict(options or self.options)
        if not isinstance(found.schema, dict):
            found_schema: dict[str, Any] = {} if found.schema is True else {"not": {}}
        else:
            found_schema = found.schema
        return self.rule("%json " + json.dumps({"x-guidance": chosen} | found_schema, ensure_ascii=False))

    def grammar(self, parts: Iterable[Mapping[str, Any]], unique: bool = False) -> str:
        """A grammar of its own, as one expression of this one."""
        first, *others = parts
        name = f"part_{len(self.parts)}"
        self.parts += [{**first, "name": name}, *({**other} for other in others)]
        self.open |= unique
        return f"@{name}"

    def until(self, *ends: str) -> str:
        """Any text up to one of some tags, and the tag."""
        tokens = [end for end in ends if end in self.special]
        texts = [end for end in ends if end not in self.special]
        found = [f"({self.rule(ANY)} {self.literal(end)})" for end in tokens]
        if texts:
            found.append(self.rule(f"/(.|\\n)*({'|'.join(map(in_regex, texts))})/", "[lazy]"))
        return found[0] if len(found) == 1 else "(" + " | ".join(found) + ")"

    def without(self, *excluded: str) -> str:
        """Any text in which none of these comes."""
        texts = [each for each in excluded if each and each not in self.special]
        if not texts:
            return self.rule(ANY)
        name = f"TEXT{len(self.lines)}"
        self.lines.append(f"{name}: /(?s:.*)/ & ~/(?s:.*)({'|'.join(map(in_regex, texts))})(?s:.*)/")
        return name

    def text(self, start: str) -> list[dict[str, Any]]:
        return [{"lark_grammar": "\n".join([f"start: {start}", *self.lines])}, *self.parts]


def regex_parts(pattern: str) -> list[dict[str, Any]]:
    """A regular expression as a grammar of its own."""
    from llguidance import LLMatcher

    lark = json.loads(LLMatcher.grammar_from_regex(pattern))["grammars"][0]["lark_grammar"]
    return [{"lark_grammar": lark}]


def quoted(text: str) -> str:
    """A string as Lark has it."""
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        raise UserError("grammar", "holds half a surrogate pair, which is no text")
    return json.dumps(text, ensure_ascii=False)


def in_regex(text: str) -> str:
    """A literal inside of /.../."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)
