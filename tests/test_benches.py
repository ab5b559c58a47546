"""Whatever a bench imports is there: nothing else would notice that something was renamed until it is run.

pytest tests/test_benches.py
"""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHES = sorted((Path(__file__).parents[1] / "bench").glob("*.py"))
OURS = ("moesaic", "bench", "tests")


def wanted(file: Path) -> list[tuple[str, str]]:
    """(module, name) of what is imported of our own when the file is."""
    nodes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    ours = [node for node in nodes if (node.module or "").split(".")[0] in OURS]
    return [(node.module or "", alias.name) for node in ours for alias in node.names]


@pytest.mark.parametrize("file", BENCHES, ids=lambda file: file.stem)
def test_what_a_bench_imports_is_there(file: Path) -> None:
    for module, name in wanted(file):
        if module.split(".")[0] == "bench":  # which would import peers that may be missing
            assert (file.parent / f"{module.partition('.')[2] or name}.py").exists(), f"{module} has no {name}"
            continue
        found = importlib.import_module(module)
        assert hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), f"{module} has no {name}"
