"""What chat templates are written in: Jinja, with the few words that `transformers` adds to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moesaic.errors import UserError


class Refused(Exception):
    """A chat template's own words about messages it does not take."""


class Generation(Extension):
    """`{% generation %}` marks what the assistant says, for those who learn from it; the text is the same without."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # what is set in it is forgotten behind it


def compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(text)


def read_template(path: Path) -> str:
    """A chat template from a file, which is Jinja at least."""
    try:
        text = path.read_text()
        compiled(text)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(path, f"cannot be read ({reason})", "Give a file that holds a Jinja template.") from None
    except TemplateSyntaxError as error:
        raise UserError(path, f"line {error.lineno} is not Jinja ({error.message})", "Correct it.") from None
    return text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: Any) -> Any:
    """Filters such as `map` give generators, which some templates write as JSON."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _refuse(message: str) -> None:
    raise Refused(message)
