"""Every key that a recipe may have, with its default and what it is for: what `moesaic train --keys` prints.

The list is made from the sections' own types, so that it cannot fall behind them. It is YAML, and itself a recipe: what
is off by default, and what must be given, stands in comments.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moesaic.methods import Method
from moesaic.recipe import Recipe
from moesaic.recipe_sections import Section

WIDTH = 46  # column of the descriptions
# Where the methods are that a key may name.
METHODS = {
    "curriculum": "moesaic.data.curricula",
    "quality": "moesaic.data.quality",
    "scores": "moesaic.data.quality",
    "objective": "moesaic.train.objectives",
    "optimizer": "moesaic.train.optimizers",
    "schedule": "moesaic.train.schedules",
}


def keys(section: str | None = None) -> str:
    """The keys of one section, or of all; before these, which of them to look at for what."""
    names = [section] if section else list(Recipe.model_fields)
    lines = [line for name in names for line in _field(name, Recipe.model_fields[name], "")]
    return "\n".join(lines if section else [*_index(), "", *lines])


def _index() -> Iterator[str]:
    """What people look for, and the keys that have to do with it."""
    found: dict[str, list[str]] = {}
    for name, field in Recipe.model_fields.items():
        inner = _section(field.annotation)
        headings = inner.headings if inner is not None and issubclass(inner, Section) else {}
        heading = next(iter(headings.values()), name)
        for key in inner.model_fields if inner is not None else (None,):
            heading = headings.get(key or "", heading)
            found.setdefault(heading, []).append(f"{name}.{key}" if key else name)
    for heading, named in found.items():
        yield from textwrap.wrap(
            f"{heading}: {', '.join(named)}",
            120,
            initial_indent="# ",
            subsequent_indent="#     ",
            break_on_hyphens=False,
        )


def _field(name: str, field: FieldInfo, indent: str) -> Iterator[str]:
    inner = _section(field.annotation)
    default = field.get_default(call_default_factory=True)
    about = field.description or ""
    if inner is not None:
        many = typing.get_origin(field.annotation) is tuple
        off = default is None or many
        about = about or (inner.__doc__ or "").partition("\n")[0]
        mark = f"{indent}# " if off else indent
        yield _line(f"{mark}{name}:", f"a list; each: {about}" if many else about)
        headings = inner.headings if issubclass(inner, Section) else {}
        for key, entry in inner.model_fields.items():
            if key in headings:
                yield f"{mark}  # -- {headings[key]}"
            yield from _field(key, entry, f"{mark}  ")
        return
    if name in METHODS:
        names = ", ".join(_methods(METHODS[name]))
        about = f"{about}: {names}" if about else names
    if field.is_required():
        yield _line(f"{indent if '#' in indent else indent + '# '}{name}: ...", about or "must be given")
        return
    yield _line(f"{indent}{name}: {_plain(default)}", about)


def _methods(package: str) -> list[str]:
    folder = importlib.util.find_spec(package)
    assert folder is not None and folder.submodule_search_locations
    names = (module.name for module in pkgutil.iter_modules(folder.submodule_search_locations))
    return sorted(name for name in names if not name.startswith("_"))


def _line(text: str, about: str) -> str:
    return f"{text:<{WIDTH}}  # {about}" if about else text


def _plain(value: Any) -> str:
    if isinstance(value, Method):
        value = value.plain()
    if isinstance(value, tuple):
        value = [one.plain() if isinstance(one, Method) else one for one in value]
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).removesuffix("\n").removesuffix("\n...")


def _section(kind: Any) -> type[BaseModel] | None:
    """The section that a key holds, or holds some of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if typing.get_origin(kind) in (tuple, types.UnionType, typing.Union):
        found = (_section(one) for one in typing.get_args(kind))
        return next((one for one in found if one is not None), None)
    return None
