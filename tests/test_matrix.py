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
from tests.matrix import METHODS
from tests.model.oracle import CASES

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


def test_every_family_is_listed_and_compared() -> None:
    assert sorted(METHODS["model/families"]) == families.known()
    counted = [case["model_type"] for case in CASES.values()]
    for family in METHODS["model/families"]:
        assert counted.count(family) >= 3 or family == "moesaic"  # our own is what transformers does not have
