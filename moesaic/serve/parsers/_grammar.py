"""Calls as rules of a grammar: what a parser reads, told to those who constrain what is written. Arguments have the
schema of their tool, and keys that it does not name are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from moesaic.serve.core.grammars.lark import Rules
from moesaic.serve.parsers._events import Tools

BREAK = r"/\n?/"
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def each_call(rules: Rules, tools: Tools, write: Callable[[str, str], str]) -> str:
    """Any of the tools' calls, as `write` has it: given a name, and the expression of its arguments as JSON."""
    return _any(rules, [write(name, rules.schema(schema, place)) for name, schema, place in _schemas(tools)])


def json_call(rules: Rules, tools: Tools, arguments: str = "arguments", head: str = "{") -> str:
    """{"name": ..., "arguments": {...}}, of which the head may have been written."""

    def write(name: str, schema: str) -> str:
        before = f'{head}"name": "{name}", "{arguments}": '
        return f"{rules.literal(before)} {schema} {rules.literal('}')}"

    return each_call(rules, tools, write)


def element_call(rules: Rules, tools: Tools, head: str, key: str, end: str, closing: str) -> str:
    """A call that has an element for each argument: `head` with its NAME, `key` with the argument's KEY, the value and
    an `end`; all have their place among the others, and those that are not required may be missing. A text comes as it
    is, anything else as JSON."""
    calls = []
    for name, schema, place in _schemas(tools):
        found = [rules.literal(head.replace("NAME", name))]
        required = schema.get("required")
        for argument, given in _properties(schema).items():
            value = _element(rules, given, schema, end, f"{place}.properties.{argument}")
            element = f"({rules.literal(key.replace('KEY', argument))} {value})"
            found.append(element if isinstance(required, list) and argument in required else f"{element}?")
        calls.append(" ".join([*found, rules.literal(closing)]))
    return _any(rules, calls)


def _element(rules: Rules, given: Any, schema: Mapping[str, Any], end: str, place: str) -> str:
    """A value and its end."""
    if isinstance(given, dict) and given.get("type") == "string" and not given.get("pattern"):
        if isinstance(options := given.get("enum"), list) and all(isinstance(option, str) for option in options):
            return f"({' | '.join(rules.literal(option) for option in options)}) {rules.literal(end)}"
        tag = end.strip("\n")  # a line break before it is no part of the value
        return " ".join([rules.until(tag), *([rules.literal("\n")] if end.endswith("\n") else [])])
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    whole = {**given, **definitions} if isinstance(given, dict) else given
    return f"{rules.schema(whole, place)} {rules.literal(end)}"


def _any(rules: Rules, calls: list[str]) -> str:
    return rules.rule(" | ".join(calls))


def _schemas(tools: Tools) -> Iterator[tuple[str, dict[str, Any], str]]:
    for number, tool in enumerate(tools):
        function = tool.get("function", tool)
        schema = function.get("parameters")
        place = f"tools.{number}.function.parameters"
        yield function["name"], {"type": "object", **schema} if isinstance(schema, dict) and schema else NOTHING, place


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}
