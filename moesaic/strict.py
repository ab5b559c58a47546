"""Strict checking of what a person wrote, with errors that name the key, what was expected and what was found.

Recipes and methods both come through here, so that the same mistake is answered in the same words everywhere. A number
in quotes is not a number, an unknown key is an error, and a whole number will do where any number is asked for.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from moesaic.errors import UserError

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

KeyPath = tuple[str | int, ...]
Origin = Callable[[KeyPath], str]  # which file, or the command line, a key came from
M = TypeVar("M", bound=BaseModel)

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, of a dataclass in one
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "none_required": "nothing (null)",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "dataclass_type": "keys with values",
}
BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
COUNTS = {
    "too_short": ("at least", "min_length", ("entry", "entries")),
    "too_long": ("at most", "max_length", ("entry", "entries")),
    "string_too_short": ("at least", "min_length", ("character", "characters")),
    "string_too_long": ("at most", "max_length", ("character", "characters")),
}


def validate(kind: type[M], values: Mapping[str, Any], origin: Origin, prefix: KeyPath = (), thing: str = "key") -> M:
    """Make a `kind` of plain values (what YAML holds), or raise a UserError.

    `prefix` stands before every key in messages, and `thing` says what such a key is.
    """
    try:
        # By way of JSON, in which a list is a tuple and text is text, whatever else Python might make of them.
        return kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        known = keys(kind)
        problems = _problems(error, values, known)
        path, details = problems[0]
        more = len(problems) - 1
        also = f"{more} more problem{'s' if more > 1 else ''} after this one." if more else ""
        raise UserError(place((*prefix, *path), origin), _problem(path, details, known, prefix, thing), also) from None


def place(path: KeyPath, origin: Origin) -> str:
    """`recipes/mine.yaml: train.steps`."""
    return f"{origin(path)}: {dotted(path)}" if path else origin(path)


def keys(kind: type[BaseModel], above: KeyPath = ()) -> list[KeyPath]:
    """Every key that `kind` knows, at any depth; `*` stands for any entry of a list."""
    known: list[KeyPath] = []
    for name, field in kind.model_fields.items():
        known.append((*above, name))
        inner = [field.annotation, *get_args(field.annotation)]
        entry: KeyPath = ("*",) if get_origin(field.annotation) is tuple else ()
        for section in inner:
            if isinstance(section, type) and issubclass(section, BaseModel):
                known += keys(section, (*above, name, *entry))
    return known


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean ...?`, or, where nothing is near, `; known: ...`."""
    names = list(names)
    close = nearest(name, names)
    if close is not None:
        return f"; did you mean {close}?"
    return f"; known: {', '.join(sorted(names))}" if names else ""


def dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def found(value: object) -> str:
    """What somebody wrote, in a few words."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'text "{value if len(value) <= 40 else value[:37] + "..."}"'
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if isinstance(value, Mapping):
        return "keys with values"
    return str(value)


def wrong(problem: str) -> PydanticCustomError:
    """What a validator raises: `problem` is a whole sentence, shown as it is."""
    return PydanticCustomError("wrong", "{problem}", {"problem": problem})


def _problems(
    error: ValidationError, values: Mapping[str, Any], known: list[KeyPath]
) -> list[tuple[KeyPath, ErrorDetails]]:
    """Errors by the path of the key as it was written.

    Where a key may have one of several types, every type reports why it did not fit; those that got furthest into the
    value are kept.
    """
    by_path: dict[KeyPath, ErrorDetails] = {}
    for details in error.errors(include_url=False):
        path = _as_written(details["loc"], values, known)
        before = by_path.get(path)
        if before is not None and {details["type"], before["type"]} <= {*EXPECTED, "either"}:
            by_path[path] = either(before, details)
        elif before is None or before["type"] in EXPECTED:
            by_path[path] = details  # the type fitted, and something else is wrong
    outer = {path[:length] for path in by_path for length in range(len(path))}
    problems = [(path, details) for path, details in by_path.items() if path not in outer]
    return sorted(problems, key=lambda problem: problem[1]["type"] not in UNKNOWN)  # a typo explains the rest


def _as_written(location: KeyPath, values: Any, known: list[KeyPath]) -> KeyPath:
    """The part of pydantic's location that is keys; the rest names the types it tried."""
    path: KeyPath = ()
    for part in location:
        written = (
            part in values
            if isinstance(values, Mapping)
            else isinstance(values, list) and isinstance(part, int) and part < len(values)
        )
        if written:
            values = values[part]
        elif _general((*path, part)) in known:
            values = None  # missing, or a default that does not go with what was written
        else:
            continue
        path = (*path, part)
    return path


def _general(path: KeyPath) -> KeyPath:
    return tuple("*" if isinstance(part, int) else part for part in path)


def either(one: ErrorDetails, other: ErrorDetails) -> ErrorDetails:
    """Two types a value might have had, and has not."""
    texts = [_expected(details) for details in (one, other)]
    texts = list(dict.fromkeys(text for text in texts if text != EXPECTED["none_required"])) or texts[:1]
    return {**one, "type": "either", "ctx": {"expected": " or ".join(texts)}}


def _expected(details: ErrorDetails) -> str:
    return details["ctx"]["expected"] if details["type"] == "either" else EXPECTED[details["type"]]


def _problem(path: KeyPath, details: ErrorDetails, known: list[KeyPath], prefix: KeyPath, thing: str) -> str:
    if details["type"] in UNKNOWN:
        return f"no such {thing}" + _suggestion(path, known, prefix)
    return sentence(details)


def sentence(details: ErrorDetails) -> str:
    """What is wrong with a value."""
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind in ("missing", "union_tag_not_found"):
        return "missing"
    if kind == "wrong":
        return str(context["problem"])
    if kind == "literal_error":
        return _one_of(context["expected"], value)
    if kind == "union_tag_invalid":
        return _one_of(context["expected_tags"], context["tag"])
    if kind in BOUNDS:
        words, name = BOUNDS[kind]
        limit = context[name]
        return f"must be {words} {limit if isinstance(limit, int) else f'{limit:g}'}, found {found(value)}"
    if kind in COUNTS:
        words, name, (one, more) = COUNTS[kind]
        things = f"{context[name]} {one if context[name] == 1 else more}"
        return f"must have {words} {things}, found {context.get('actual_length', len(value))}"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}, found {found(value)}"
    if kind in EXPECTED or kind == "either":
        return f"expected {_expected(details)}, found {found(value)}"
    if kind == "json_invalid":
        return "nested too deeply, or not text"
    return details["msg"][:1].lower() + details["msg"][1:]


def _one_of(expected: str, value: object) -> str:
    """`expected` as pydantic lists choices: 'a', 'b' or 'c'."""
    choices = [choice.strip("'") for choice in expected.replace(" or ", ", ").split(", ")]
    close = nearest(value, choices) if isinstance(value, str) else None
    return f"expected {'one of ' * (len(choices) > 1)}{', '.join(choices)}; found {found(value)}" + (
        f"; did you mean {close}?" if close else ""
    )


def _suggestion(path: KeyPath, known: list[KeyPath], prefix: KeyPath) -> str:
    """The nearest key beside this one, else the same key in another section, else all the keys there are here."""
    above, last = path[:-1], str(path[-1])
    siblings = [str(key[-1]) for key in known if key[:-1] == _general(above)]
    if close := nearest(last, siblings):
        return f"; did you mean {dotted((*prefix, *above, close))}?"
    for key in known:
        if key[-1] == last and "*" not in key:
            return f"; did you mean {dotted((*prefix, *key))}?"
    return f"; known here: {', '.join(siblings)}" if siblings else ""
