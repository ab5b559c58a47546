"""No method goes untested: every file of every kind has its line in the matrix."""

from __future__ import annotations

import ast
import importlib
from functools import cache
from pathlib import Path

import pytest

import moesaic
from moesaic.methods import known
from moesaic.model import families
from tests.ideas import IDEAS
from tests.matrix import COMPARED, METHODS, RENAMED
from tests.model.oracle import CASES, ENCODER_CASES

ROOT = Path(moesaic.__file__).parent


def classes(path: Path) -> list[ast.ClassDef]:
    return [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]


@cache
def kinds() -> dict[str, str]:
    """Every package whose __init__.py defines a class that its files extend, and the name of that class."""
    found = {}
    for init in sorted(ROOT.rglob("__init__.py")):
        bases = [node.name for node in classes(init)]
        extended = {
            ast.unparse(base)
            for path in init.parent.glob("*.py")
            if path != init
            for node in classes(path)
            for base in node.bases
        }
        if used := [name for name in bases if name in extended]:
            found[str(init.parent.relative_to(ROOT))] = used[-1]
    return found


def test_every_kind_is_listed() -> None:
    assert kinds().keys() == METHODS.keys() - {"model/families"}


@pytest.mark.parametrize("kind", [kind for kind in METHODS if kind != "model/families"])
def test_every_method_is_listed(kind: str) -> None:
    package = importlib.import_module(f"moesaic.{kind.replace('/', '.')}")
    base = getattr(package, kinds()[kind])
    assert sorted(METHODS[kind]) == known(base)


@pytest.mark.parametrize("kind", sorted(METHODS.keys() - COMPARED))
def test_every_method_has_an_idea_that_a_test_misses(kind: str) -> None:
    """A line in tests/ideas/ for each: what it is without its idea (docs/adding.md)."""
    known = {idea.method for idea in IDEAS}
    assert [name for name in METHODS[kind] if f"{kind}/{name}" not in known] == []


def test_ideas_are_of_methods_and_claimed_by_tests_that_are_there() -> None:
    methods = {f"{kind}/{name}" for kind, names in METHODS.items() for name in names}
    for idea in IDEAS:
        assert idea.method in methods or (ROOT / f"{idea.method}.py").is_file(), idea.method
    assert len({(idea.method, idea.idea) for idea in IDEAS}) == len(IDEAS)
    for idea in IDEAS:
        file, *names = idea.test.partition("[")[0].split("::")
        text = (Path(__file__).parent / file).read_text()
        assert names and all(f"class {name}" in text or f"def {name}(" in text for name in names), idea.test
        assert (ROOT / idea.path).read_text().count(idea.has) == 1, f"{idea.path}: {idea.has}"


def test_every_family_is_listed_and_compared() -> None:
    assert sorted(METHODS["model/families"]) == families.known()
    counted = [case["model_type"] for case in (*CASES.values(), *ENCODER_CASES.values())]
    for family in METHODS["model/families"]:
        # Our own is what transformers does not have; those under another name are compared in test_other_names.py.
        assert counted.count(family) >= 3 or family == "moesaic" or family in RENAMED
