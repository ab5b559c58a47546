"""The form an answer must have, in the ways clients say it, as a grammar the sampler follows."""

from __future__ import annotations

import json
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.sampling import JsonObjectFormat, JsonSchemaFormat, SamplingForm
from moesaic.serve.grammar import Grammar


def wanted_grammar(form: SamplingForm) -> Grammar | None:
    """None if any text will do."""
    found: dict[str, Grammar] = {}
    match form.response_format:
        case JsonObjectFormat():
            found["response_format"] = Grammar.json()
        case JsonSchemaFormat(json_schema=wish):
            if wish.json_schema is None:
                raise UserError("response_format.json_schema.schema", "is missing")
            found["response_format"] = Grammar.json(wish.json_schema)
    if form.guided_json is not None:
        found["guided_json"] = Grammar.json(_schema(form.guided_json, "guided_json"))
    if form.guided_regex is not None:
        found["guided_regex"] = Grammar.regex(form.guided_regex)
    if form.guided_choice is not None:
        found["guided_choice"] = Grammar.choice(form.guided_choice)
    if form.guided_grammar is not None:
        found["guided_grammar"] = Grammar.lark(form.guided_grammar)
    if (wishes := form.structured_outputs) is not None:
        if wishes.json_form is not None:
            found["structured_outputs.json"] = Grammar.json(_schema(wishes.json_form, "structured_outputs.json"))
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


def _schema(wish: dict[str, Any] | str, place: str) -> dict[str, Any]:
    if isinstance(wish, dict):
        return wish
    try:
        schema = json.loads(wish)
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, dict):
        raise UserError(place, "is not a JSON schema")
    return schema
