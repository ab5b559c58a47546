"""`key=value` words of a command line, shared out among the methods it names."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, TypeVar

from moesaic.errors import UserError
from moesaic.methods import Method, build, known, renamed
from moesaic.strict import did_you_mean
from moesaic.yaml_reader import read_yaml

Base = TypeVar("Base")


class MethodOptions:
    """Each method takes the options it knows. Where two know the same, `policy.key=value` says whose it is."""

    def __init__(self, words: list[str]) -> None:
        self.values: dict[str, Any] = {}
        self.taken: set[str] = set()
        self.known: list[str] = []
        for word in words:
            key, sign, text = word.partition("=")
            if not sign or not key:
                raise UserError("command line", f'"{word}" is not key=value')
            self.values[key] = read_yaml(text, "command line")

    def make(self, name: str | None, base: type[Base], flag: str) -> Base | None:
        if name is None:
            return None
        name = renamed(Method(name), base, flag).name
        own: dict[str, Any] = {}
        fields: set[str] = set()
        if name in known(base):
            module = importlib.import_module(f"{base.__module__}.{name}")
            kinds = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
            fields = {
                field.name
                for kind in kinds
                if dataclasses.is_dataclass(kind)
                for field in dataclasses.fields(kind)
                if field.init
            }
        self.known += sorted(fields)
        prefix = f"{flag.removeprefix('--')}."
        for key, value in self.values.items():
            if key in fields or key.startswith(prefix):
                own[key.removeprefix(prefix)] = value
                self.taken.add(key)
        return build(Method(name, own), base, flag)

    def check(self) -> None:
        """Every option must be somebody's."""
        for key in self.values:
            if key not in self.taken:
                problem = "no method that was named has such an option"
                raise UserError(f"command line: {key}", problem + did_you_mean(key, self.known))
