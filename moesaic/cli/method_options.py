"""`key=value` words of a command line, shared out among the methods it names."""

from __future__ import annotations

from typing import Any, TypeVar

from moesaic.errors import UserError
from moesaic.methods import Method, build, option_names, renamed
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
        names, prefix = option_names(name, base), f"{flag.removeprefix('--')}."
        self.known += sorted(names)
        own = {key: value for key, value in self.values.items() if key in names or key.startswith(prefix)}
        self.taken |= own.keys()
        return build(Method(name, {key.removeprefix(prefix): value for key, value in own.items()}), base, flag)

    def check(self) -> None:
        """Every option must be somebody's."""
        for key in self.values:
            if key not in self.taken:
                problem = "no method that was named has such an option"
                raise UserError(f"command line: {key}", problem + did_you_mean(key, self.known))
