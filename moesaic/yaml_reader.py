"""Read YAML strictly: plain values only, no key twice, and an error that says the line and column.

Scalars are read as YAML 1.2 does, not as PyYAML does: `1e-4` is a number, `no` and `2024-01-01` are text. Anchors,
aliases and `<<` work; tags that make Python objects do not exist here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from moesaic.errors import UserError

MOST_VALUES = 100_000  # more than any recipe has; aliases of aliases can stand for billions


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}
    yaml_constructors = {
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in ("str", "seq", "map")
    }


_PREFIX = "tag:yaml.org,2002:"
# What a scalar looks like, the characters it may begin with, and how its text is read.
_SCALARS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "null": (r"~|null|Null|NULL|", "~nN", lambda text: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+",
        "-+0123456789",
        lambda text: int(text, 0 if text[:2] in ("0x", "0o") else 10),
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
        lambda text: float(re.sub(r"\.(?=[iInN])", "", text)),
    ),
}
for _name, (_pattern, _first, _read) in _SCALARS.items():

    def _construct(loader: yaml.SafeLoader, node: yaml.ScalarNode, read: Callable[[str], Any] = _read) -> Any:
        return read(str(loader.construct_scalar(node)))

    _Loader.add_implicit_resolver(
        _PREFIX + _name, re.compile(f"^(?:{_pattern})$"), [*_first] + [""] * (_name == "null")
    )
    _Loader.add_constructor(_PREFIX + _name, _construct)
_Loader.add_implicit_resolver(_PREFIX + "merge", re.compile("^<<$"), ["<"])


def read_yaml(text: str, place: str) -> Any:
    """The value of one YAML document, free of aliases: changing one part of it changes no other."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _refuse_duplicates(root, place, set())
            return _Copy(place).of(loader.construct_document(root))
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(place, f"not valid YAML{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(place, f"not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(place, "nested too deeply") from None
    except ValueError as error:
        raise UserError(place, f"not valid YAML: {error}") from None


def _refuse_duplicates(node: yaml.Node, place: str, seen: set[int]) -> None:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_duplicates(child, place, seen)
    elif isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.tag != _PREFIX + "merge":
                if key.value in first:
                    problem = f'the key "{key.value}" of line {first[key.value]} is written again at line {line}'
                    raise UserError(place, problem, "Keep one of them.")
                first[key.value] = line
            _refuse_duplicates(value, place, seen)


class _Copy:
    """Copies plain values without what they share."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.values = 0

    def of(self, value: Any) -> Any:
        self.values += 1
        if self.values > MOST_VALUES:
            raise UserError(self.place, f"holds more than {MOST_VALUES:,} values once its aliases are written out")
        if isinstance(value, dict):
            for key in value:
                if not isinstance(key, str):
                    raise UserError(self.place, f"the key {key!r} is not text", "Put it in quotes.")
            return {self.of(key): self.of(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.of(entry) for entry in value]
        if isinstance(value, str):
            value.encode()  # an escape can name half a character, which is no text
        return value
