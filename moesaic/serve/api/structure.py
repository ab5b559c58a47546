"""The form an answer must have, in the ways clients say it, as a grammar the sampler follows."""

from __future__ import annotations

import json
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.sampling import MOST_FORM, JsonObjectFormat, JsonSchemaFormat, SamplingForm
from moesaic.serve.grammar import Grammar
from moesaic.serve.request import Output


def wanted_grammar(form: SamplingForm) -> Grammar | None:
    """None if any text will do."""
    found: dict[str, Grammar] = {}
    match form.response_format:
        case JsonObjectFormat():
            found["response_format"] = Grammar.json()
        case JsonSchemaFormat(json_schema=wish):
            if wish.json_schema is None:
                raise UserError("response_format.json_schema.schema", "is missing")
            schema = checked_schema(wish.json_schema, "response_format")
            found["response_format"] = Grammar.json(schema)
    if form.guided_json is not None:
        found["guided_json"] = Grammar.json(checked_schema(form.guided_json, "guided_json"))
    if form.guided_regex is not None:
        found["guided_regex"] = Grammar.regex(form.guided_regex)
    if form.guided_choice is not None:
        found["guided_choice"] = Grammar.choice(form.guided_choice)
    if form.guided_grammar is not None:
        found["guided_grammar"] = Grammar.lark(form.guided_grammar)
    if (wishes := form.structured_outputs) is not None:
        if wishes.json_form is not None:
            found["structured_outputs.json"] = Grammar.json(checked_schema(wishes.json_form, "structured_outputs.json"))
        if wishes.regex is not None:
            found["structured_outputs.regex"] = Grammar.regex(wishes.regex)
        if wishes.choice is not None:
            found["structured_outputs.choice"] = Grammar.choice(wishes.choice)
        if wishes.grammar is not None:
            found["structured_outputs.grammar"] = Grammar.lark(wishes.grammar)
        if wishes.json_object:
            found["structured_outputs.json_object"] = Grammar.json()
    if len(found) > 1:
        raise UserError(", ".join(found), "only one of them can be followed", "Give one.")
    return next(iter(found.values()), None)


def check_form(output: Output) -> None:
    """Some forms turn out to be more than the grammar's library will follow only when an answer is half written."""
    matcher = output.request.matcher
    if output.finish_reason is not None and matcher is not None and matcher.inner.is_error():
        reason = " ".join(matcher.inner.get_error().split("\n")[0].split())[:200]
        raise UserError("response_format", f"the form of the answer cannot be followed ({reason})", "Make it simpler.")


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
