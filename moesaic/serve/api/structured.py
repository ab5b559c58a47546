"""Structured outputs: all the ways in which clients ask for a form, as the one grammar the engine follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.sampling import GenerationRequest
from moesaic.serve.api.schema.structured import (
    MAX_GRAMMAR_CHARS,
    GrammarFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    RegexFormat,
    ResponseFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.grammars.lark import WHITESPACE
from moesaic.serve.core.grammars.structural_tag import structural_tag_rules

Special = Callable[[], Mapping[str, int]]  # tokens that stand for themselves; asked for only where a form needs them


def output_grammar(body: GenerationRequest, special: Special) -> Grammar | None:
    """The grammar of structured outputs, in any of the ways clients ask for them; None if any text will do."""
    forms = Forms(body.guided_whitespace_pattern or WHITESPACE, special)
    forms.add_response_format(body.response_format)
    forms.add_json("guided_json", body.guided_json)
    forms.add("guided_regex", body.guided_regex, Grammar.regex)
    forms.add("guided_choice", body.guided_choice, Grammar.choice)
    forms.add("guided_grammar", body.guided_grammar, Grammar.written)
    forms.add_json("guided_json_object", {"type": "object"} if body.guided_json_object else None)
    if body.structured_outputs is not None:
        forms.add_structured_outputs(body.structured_outputs)
    forms.add_tag("structural_tag", body.structural_tag)
    forms.add_json("json_schema", body.json_schema)
    forms.add("regex", body.regex, Grammar.regex)
    forms.add("ebnf", body.ebnf, Grammar.gbnf)
    forms.add("grammar", body.grammar or None, Grammar.written)  # llama.cpp's clients send an empty one for none
    return forms.one()


class Forms:
    """Those that a request names, of which there may be one."""

    def __init__(self, whitespace: str, special: Special, compact: bool = False) -> None:
        self.whitespace, self.special, self.compact = whitespace, special, compact
        self.found: list[Grammar] = []

    def one(self) -> Grammar | None:
        if len(self.found) > 1:
            others = ", ".join(grammar.place for grammar in self.found[1:])
            raise UserError(self.found[0].place, f"cannot be followed together with {others}", "Give one.")
        return self.found[0] if self.found else None

    def add(self, place: str, given: Any, make: Any) -> None:
        if given is not None:
            self.found.append(make(given, place))

    def add_json(self, place: str, given: dict[str, Any] | bool | str | None) -> None:
        if given is None:
            return
        schema = json_schema(given, place)
        self.found.append(Grammar.json(schema, place, whitespace=self.whitespace, compact=self.compact))

    def add_tag(self, place: str, given: dict[str, Any] | str | None) -> None:
        if given is None:
            return
        tag = json_object(given) if isinstance(given, str) else given
        if tag is None:
            raise UserError(place, "is not a JSON object")
        if len(json.dumps(tag)) > MAX_GRAMMAR_CHARS:
            raise UserError(place, f"is longer than {MAX_GRAMMAR_CHARS} characters")
        rules, start = structural_tag_rules(tag, place, self.special())
        self.found.append(Grammar.of(rules, start, place))

    def add_response_format(self, given: ResponseFormat | None) -> None:
        match given:
            case JsonObjectFormat(schema_beside=schema):
                place = "response_format" if schema is None else "response_format.schema"
                self.add_json(place, {"type": "object"} if schema is None else schema)
            case JsonSchemaFormat(json_schema=requested, schema_beside=beside):
                schema = requested.json_schema if requested is not None else beside
                place = "response_format.json_schema.schema" if requested is not None else "response_format.schema"
                if schema is None:
                    raise UserError("response_format.json_schema.schema", "is missing")
                self.add_json(place, schema)
            case RegexFormat(pattern=pattern):
                self.add("response_format.pattern", pattern, Grammar.regex)
            case GrammarFormat(grammar=grammar):
                self.add("response_format.grammar", grammar, Grammar.written)
            case StructuralTagFormat():
                self.add_tag("response_format", given.model_dump(exclude_none=True))

    def add_structured_outputs(self, given: StructuredOutputs) -> None:
        above = "structured_outputs."
        self.whitespace = given.whitespace_pattern or self.whitespace
        self.compact = bool(given.disable_any_whitespace)
        self.add_json(f"{above}json", given.json_schema)
        self.add(f"{above}regex", given.regex, Grammar.regex)
        self.add(f"{above}choice", given.choice, Grammar.choice)
        self.add(f"{above}grammar", given.grammar, Grammar.written)
        self.add_json(f"{above}json_object", {"type": "object"} if given.json_object else None)
        self.add_tag(f"{above}structural_tag", given.structural_tag)


def json_schema(given: dict[str, Any] | bool | str, place: str) -> dict[str, Any] | bool:
    """A schema whose size can be compiled in reasonable time."""
    schema = json_object(given) if isinstance(given, str) else given
    if schema is None:
        raise UserError(place, "is not a JSON schema")
    if len(json.dumps(schema)) > MAX_GRAMMAR_CHARS:
        raise UserError(place, f"is longer than {MAX_GRAMMAR_CHARS} characters")
    return schema


def json_object(text: str) -> dict[str, Any] | None:
    """None if the text is no JSON object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
