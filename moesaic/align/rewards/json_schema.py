"""Right in form: the answer is JSON, and as the schema says if there is one (package jsonschema)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from moesaic.align.rewards import Reward
from moesaic.worlds.judges import Answer
from moesaic.worlds.judges.answer_part import after_thought
from moesaic.worlds.judges.strict_json import strict_json

FENCED = re.compile(r"^```(?:json)?[ \t]*\n(.*?)\n?```$", re.DOTALL)


@dataclass(frozen=True)
class JsonSchema(Reward):
    """The schema comes with the question, `facts["schema"]`; questions that have none share the one given here."""

    default_schema: dict[str, Any] | None = None
    fences: bool = True  # whether JSON may stand in a block of code
    any_json: float = 0.0  # what JSON that breaks the schema is worth

    def __post_init__(self) -> None:
        if self.default_schema is not None:
            _checked(self.default_schema)

    def __call__(self, answer: Answer) -> float:
        text = after_thought(answer.text)
        if self.fences and (inner := FENCED.match(text)):
            text = inner[1]
        try:
            value = strict_json(text)
        except (ValueError, RecursionError):
            return 0.0
        schema = answer.facts.get("schema", self.default_schema)
        if schema is None:
            return 1.0
        return 1.0 if _checked(schema).is_valid(value) else self.any_json


def _checked(schema: Any) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message}") from error
    return kind(schema, registry=Registry())  # an empty registry: a schema is never fetched from anywhere
