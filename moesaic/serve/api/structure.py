"""The form an answer must have, in the ways clients say it, as a grammar the sampler follows."""

from __future__ import annotations

import json
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.sampling import MOST_FORM, JsonObjectFormat, JsonSchemaFormat, SamplingForm
from moesaic.serve.core.grammar import Grammar, reason
from moesaic.serve.core.request import Output


def wanted_grammar(form: SamplingForm) -> Grammar | None:
    """None if any text will do."""
    found: list[Grammar] = []
    match form.response_format:
        case JsonObjectFormat():
            found.append(Grammar.json(None, "response_format"))
        case JsonSchemaFormat(json_schema=wish):
            place = "response_format.json_schema.schema"
            if wish.json_schema is None:
                raise UserError(place, "is missing")
            found.append(Grammar.json(checked_schema(wish.json_schema, place), place))
    if form.guided_json is not None:
        found.append(Grammar.json(checked_schema(form.guided_json, "guided_json"), "guided_json"))
    if form.guided_regex is not None:
        found.append(Grammar.regex(form.guided_regex, "guided_regex"))
    if form.guided_choice is not None:
        found.append(Grammar.choice(form.guided_choice, "guided_choice"))
    if form.guided_grammar is not None:
        found.append(Grammar.lark(form.guided_grammar, "guided_grammar"))
    if (wishes := form.structured_outputs) is not None:
        above = "structured_outputs"
        if wishes.json_form is not None:
            found.append(Grammar.json(checked_schema(wishes.json_form, f"{above}.json"), f"{above}.json"))
        if wishes.regex is not None:
            found.append(Grammar.regex(wishes.regex, f"{above}.regex"))
        if wishes.choice is not None:
            found.append(Grammar.choice(wishes.choice, f"{above}.choice"))
        if wishes.grammar is not None:
            found.append(Grammar.lark(wishes.grammar, f"{above}.grammar"))
        if wishes.json_object:
            found.append(Grammar.json(None, f"{above}.json_object"))
    if len(found) > 1:
        others = ", ".join(grammar.place for grammar in found[1:])
        raise UserError(found[0].place, f"cannot be followed together with {others}", "Give one.")
    return found[0] if found else None


def check_form(output: Output) -> None:
    """Some forms turn out to be more than the grammar's library will follow only when an answer is half written."""
    grammar, matcher = output.request.sampling.grammar, output.request.matcher
    if output.finish_reason is not None and grammar is not None and matcher is not None and matcher.inner.is_error():
        problem = f"the form of the answer cannot be followed ({reason(matcher.inner.get_error())})"
        raise UserError(grammar.place, problem, "Make it simpler.")


def checked_schema(wish: dict[str, Any] | str, place: str) -> dict[str, Any]:
    """A schema of a size that is compiled in reasonable time."""
    try:
        schema = json.loads(wish) if isinstance(wish, str) else wish
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise UserError(place, "is not a JSON schema")
    if len(json.dumps(schema)) > MOST_FORM:
        raise UserError(place, f"is longer than {MOST_FORM} characters")
    return schema
