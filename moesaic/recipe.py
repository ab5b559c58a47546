"""A run's YAML: one typed section per stage, so that a misspelt key is an error before any work is done.

    recipe = load_recipe("recipes/tiny.yaml", ["train.steps=50", "schedule={name: wsd, decay: 0.2}"])
    recipe.train.steps                                # 50
    schedule = recipe.build("schedule", Schedule)     # the method that the recipe names

Every key has a default, a section that is not written is all defaults, and the later of two overrides wins. The
sections are in `recipe_sections.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import PrivateAttr

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.recipe_parallel import ParallelSection
from moesaic.recipe_sections import (
    AlignSection,
    BalanceSection,
    DataSection,
    ModelSection,
    Named,
    Section,
    TrainSection,
)
from moesaic.recipe_study import StudySection
from moesaic.renamed import RECIPE_KEYS, current, rename_keys
from moesaic.strict import KeyPath, dotted, found, nearest, place, validate
from moesaic.yaml_reader import read_yaml

COMMAND_LINE = "command line"
# Sections one might look for in a recipe, and where that is configured instead.
ELSEWHERE = {
    "compress": "moesaic compress takes its method and options on the command line",
    "evaluate": "moesaic evaluate takes its suites and options on the command line",
    "serve": "moesaic serve takes its options on the command line",
}
Base = TypeVar("Base")


class Recipe(Section):
    """Everything that defines a run."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    optimizer: Named = Method("adamw")
    schedule: Named = Method("constant")
    balance: BalanceSection = BalanceSection()
    parallel: ParallelSection = ParallelSection()
    align: AlignSection = AlignSection()
    study: StudySection = StudySection()

    _file: str = PrivateAttr("recipe")
    _overridden: tuple[KeyPath, ...] = PrivateAttr(())

    def dump(self) -> dict[str, Any]:
        """Plain values, every default included: what a lineage records, and itself a recipe."""
        return self.model_dump(mode="json")

    def origin(self, path: KeyPath) -> str:
        """Where a key was written: the recipe's file, or the command line."""
        return _origin(self._file, self._overridden, path)

    def overridden_keys(self, section: str) -> list[str]:
        """The keys of a section that the command line names."""
        given: set[str] = getattr(self, section).model_fields_set
        named = [name for name in given if any((section, name)[: len(path)] == path[:2] for path in self._overridden)]
        return [f"{section}.{name}" for name in sorted(named)]

    def changed(self, **sections: dict[str, Any]) -> Recipe:
        """The same recipe with other values in some sections' keys."""
        made = self.model_copy(
            update={name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        )
        made._file, made._overridden = self._file, self._overridden
        return made

    def build(self, key: str, base: type[Base]) -> Base:
        """The method under `key`, such as `schedule` or `align.stages.0`, made of its options."""
        path = tuple(int(part) if part.isdigit() else part for part in key.split("."))
        method = reduce(
            lambda at, part: at[part] if isinstance(part, int) else getattr(at, part), path, cast(Any, self)
        )
        assert isinstance(method, Method), f"{key} is not a method"
        return build(method, base, self.origin, path)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and lay `section.key=value` overrides over it."""
    values = read_yaml(_read(Path(path)), str(path))
    if values is None:
        raise UserError(path, "empty; a recipe has sections", f"Known: {', '.join(Recipe.model_fields)}.")
    if not isinstance(values, dict):
        raise UserError(path, f"expected sections with keys and values, found {found(values)}")
    rename_keys(values, str(path))
    overridden = tuple(_override(values, text) for text in overrides)
    rename_keys(values, COMMAND_LINE)

    def origin(key: KeyPath) -> str:
        return _origin(str(path), overridden, key)

    for name in ELSEWHERE:
        if name in values:
            raise UserError(place((name,), origin), f"no section of a recipe; {ELSEWHERE[name]}")
    recipe = validate(Recipe, values, origin)
    recipe._file, recipe._overridden = str(path), overridden
    return recipe


def with_values(recipe: Recipe, values: Mapping[str, Any], where: str) -> Recipe:
    """The recipe with other values under dotted keys; `where` says who asks for them."""
    plain = recipe.dump()
    paths = tuple(_override(plain, f"{key}={json.dumps(value)}", where) for key, value in values.items())
    made = validate(Recipe, plain, lambda key: where if any(key[: len(p)] == p for p in paths) else recipe.origin(key))
    made._file = recipe._file
    return made


def _origin(file: str, overridden: Iterable[KeyPath], key: KeyPath) -> str:
    return COMMAND_LINE if any(key[: len(other)] == other for other in overridden) else file


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = [str(file) for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        close = nearest(str(path), siblings)
        raise UserError(path, "no such file" + (f"; did you mean {close}?" if close else "")) from None
    except UnicodeDecodeError:
        raise UserError(path, "not a text file; a recipe is YAML in UTF-8") from None
    except OSError as error:
        raise UserError(path, f"cannot be read: {error.strerror}") from None


def _override(values: dict[str, Any], text: str, where: str = COMMAND_LINE) -> KeyPath:
    """Set one `section.key=value` in place; returns the key that was added or changed."""
    name, equals, value = text.partition("=")
    name = current(name.strip(), RECIPE_KEYS, where)
    parts = name.split(".")
    if not equals or not all(parts):
        raise UserError(where, f'"{text}" is not of the form section.key=value')
    at: Any = values
    path: KeyPath = ()
    made: KeyPath = ()  # the outermost section that was not in the file
    for number, part in enumerate(parts):
        here = f"{where}: {name}"
        key: str | int = part
        if isinstance(at, list):
            if not (part.isdecimal() and int(part) < len(at)):
                entries = f"{dotted(path)}.0 to {dotted(path)}.{len(at) - 1}" if at else "no entry"
                raise UserError(here, f"there is no such entry; the recipe has {entries}")
            key = int(part)
        elif not isinstance(at, dict):
            raise UserError(here, f"{dotted(path)} is {found(at)}, and has no keys")
        path = (*path, key)
        if number == len(parts) - 1:
            at[key] = read_yaml(value, here)
        else:
            if isinstance(at, dict) and at.get(part) is None:
                at[part] = {}
                made = made or path
            at = at[key]
    return made or path
