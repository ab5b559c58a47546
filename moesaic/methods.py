"""Find a pluggable method by the name in a recipe, and make it from the options beside that name.

A kind of method (schedules, drafters, rewards, ...) is a package whose `__init__.py` defines the base class. Each
other file of the package is one method: its file name is its name, its one class is a frozen dataclass that extends
the base, and the fields of that class are its options.

    schedule = recipe.build("schedule", Schedule)                        # as a recipe names it
    policy = build(Method("sink_window", {"sinks": 4}), KVPolicy, "command line")
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from moesaic.errors import UserError
from moesaic.renamed import METHODS, OPTIONS, current, current_options
from moesaic.strict import STRICT, KeyPath, Origin, did_you_mean, place, validate

Base = TypeVar("Base")


@dataclass(frozen=True)
class Method:
    """A method as a recipe names it; `{name: cosine, floor: 0.1}`, or only `cosine`."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """As it would be written in a recipe."""
        return {"name": self.name, **self.options}


def named(entries: Iterable[Mapping[str, Any] | str]) -> list[Method]:
    """Methods as a list in a recipe's options names them."""
    found = []
    for entry in entries:
        values: Mapping[str, Any] = {"name": entry} if isinstance(entry, str) else entry
        if not isinstance(values.get("name"), str):
            raise ValueError("a method is its name, or {name: ..., and its options}")
        found.append(Method(values["name"], {key: value for key, value in values.items() if key != "name"}))
    return found


def known(base: type) -> list[str]:
    """The names of all methods of a kind: its folder's files, but for those whose name begins with an underscore."""
    package = importlib.import_module(base.__module__)
    assert hasattr(package, "__path__"), f"{base.__name__} must be defined in the __init__.py of its methods' folder"
    return list(_names(tuple(package.__path__)))


@cache  # a recipe asks for dozens
def _names(folders: tuple[str, ...]) -> list[str]:
    found = pkgutil.iter_modules(folders)
    return sorted(module.name for module in found if not module.ispkg and not module.name.startswith("_"))


def classes(base: type[Base]) -> list[type[Base]]:
    """The classes of all methods of a kind, by name."""
    return [_class_in(importlib.import_module(f"{base.__module__}.{name}"), base) for name in known(base)]


def renamed(method: Method, base: type, where: str) -> Method:
    """By the names that the method and its options have now."""
    kind = base.__module__.rpartition(".")[2]
    name = current(method.name, METHODS.get(kind, {}), where)
    return Method(name, current_options(method.options, OPTIONS.get(kind, {}).get(name, {}), where))


def option_names(name: str, base: type) -> set[str]:
    """The options of a method, and what they were called in the last version; none if there is no such method."""
    if name not in known(base):
        return set()
    kind: type = _class_in(importlib.import_module(f"{base.__module__}.{name}"), base)
    old = OPTIONS.get(base.__module__.rpartition(".")[2], {}).get(name, {})
    return {option.name for option in dataclasses.fields(cast(Any, kind)) if option.init} | set(old)


def build(method: Method, base: type[Base], origin: str | Origin, key: KeyPath = ()) -> Base:
    """The method that `method` names, with its options checked.

    `origin` says where it was asked for, a file or the command line, and `key` under which key there.
    """
    where: Origin = origin if callable(origin) else lambda path: origin
    names = known(base)
    method = renamed(method, base, place((*key, "name"), where))
    if method.name not in names:
        close = did_you_mean(method.name, names)
        everything = f"Known: {', '.join(names)}." if close.endswith("?") else ""
        raise UserError(place((*key, "name"), where), f'no such method "{method.name}"{close}', everything)

    kind = _class_in(_import(f"{base.__module__}.{method.name}", method, place(key, where)), base)
    options = validate(_shape(cast(Any, kind)), method.options, where, key, f"option of {method.name}")
    try:
        return kind(**{name: getattr(options, name) for name in method.options})
    except ValueError as error:  # a method's own check of options that must go together
        raise UserError(place(key, where), str(error)) from error


@cache
def _shape(kind: type) -> type[BaseModel]:
    """What the options of a method must be."""
    hints = get_type_hints(kind, include_extras=True)  # with the bounds of Annotated
    fields = [option for option in dataclasses.fields(cast(Any, kind)) if option.init]
    return create_model(
        kind.__name__,
        __config__=ConfigDict(**STRICT, protected_namespaces=()),
        **cast(Any, {option.name: (hints[option.name], _default(option)) for option in fields}),
    )


def _import(name: str, method: Method, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == name.split(".")[0]:
            raise
        raise UserError(place, f"{method.name} needs the package {error.name}, which is not installed") from error


def _class_in(module: ModuleType, base: type[Base]) -> type[Base]:
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
        if not value.__name__.startswith("_")
    ]
    assert len(classes) == 1, f"{module.__name__} must define one {base.__name__}, not {len(classes)}"
    assert dataclasses.is_dataclass(classes[0]), f"{classes[0].__name__} must be a frozen dataclass"
    return classes[0]


def _default(option: dataclasses.Field[Any]) -> Any:
    if option.default_factory is not dataclasses.MISSING:
        return Field(default_factory=option.default_factory)
    return ... if option.default is dataclasses.MISSING else option.default
