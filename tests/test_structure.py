"""The import graph points one way: from commands down to kernels, without cycles, hidden or open."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import moesaic
from tests.slow import SLOW

ROOT = Path(moesaic.__file__).parent
MAX_LINES = 400

# Rooms from the top down; each may import what stands below it, and nothing beside or above it.
LEVELS: list[set[str]] = [
    {"__main__"},
    {"cli"},
    {"quickstart"},
    {"align", "compress", "evaluate", "plan", "doctor"},
    {"report"},
    {"worlds"},
    {"know"},
    {"train", "serve"},
    {"data", "parallel"},
    {"model"},
    {"nearest"},
    {"kernels"},
]
# Single files at the top of the package that any room may use. They use each other and no room.
SUPPORT = {path.stem for path in ROOT.glob("*.py")} - set().union(*LEVELS) - {"__init__"}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported} (line {self.line})"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs, inside functions too; not what only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from statements(other)
        else:
            yield child
            yield from statements(child)


def imports_of(name: str, path: Path) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text())):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            source = ".".join(filter(None, [above if node.level else "", node.module]))
            found = [f"{source}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "moesaic":
            found = [f"moesaic.{node.attr}"]
        for target in found:
            target = resolved(target)
            if target in MODULES and target != "moesaic":  # `import moesaic` by itself imports nothing else
                yield Import(name, target, node.lineno)


def resolved(target: str) -> str:
    """The module that a dotted name is, or is taken from; `moesaic.load` is taken from where it is defined."""
    if target not in MODULES:
        package, _, name = target.rpartition(".")
        return moesaic._LAZY.get(name, package) if package == "moesaic" else package
    return target


IMPORTS = sorted(
    {edge for name, path in MODULES.items() for edge in imports_of(name, path) if edge.imported != name}, key=str
)


def room(name: str) -> str:
    return name.split(".")[1]


def level(name: str) -> int:
    return next((number for number, rooms in enumerate(LEVELS) if room(name) in rooms), len(LEVELS))


def test_every_package_has_its_place() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - set().union(*LEVELS) == set()
    assert len(IMPORTS) > 500  # or nothing was read


def test_imports_point_down() -> None:
    wrong = [
        str(edge)
        for edge in IMPORTS
        if edge.importer != "moesaic" and room(edge.importer) != room(edge.imported)
        if level(edge.imported) <= level(edge.importer) and not {room(edge.importer), room(edge.imported)} <= SUPPORT
    ]
    assert wrong == []


def test_no_import_cycle() -> None:
    """Not between any two files, wherever in them the imports stand: a lazy import would close a cycle just as well."""
    below: dict[str, set[str]] = {name: set() for name in MODULES}
    for edge in IMPORTS:
        below[edge.importer].add(edge.imported)
    assert cycles(below) == []


def test_a_cycle_would_be_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b <-> c"]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def cycles(below: dict[str, set[str]]) -> list[str]:
    """Of a graph, the files that reach each other, together."""
    reach = {name: reachable(name, below) for name in below}
    found = {tuple(sorted(other for other in reach[name] if name in reach[other])) for name in below}
    return sorted(" <-> ".join(group) for group in found if group)


def reachable(start: str, below: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(below[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += below[name]
    return seen


def test_private_modules_stay_in_their_package() -> None:
    wrong = []
    for edge in IMPORTS:
        parts = edge.imported.split(".")
        for number, part in enumerate(parts):
            owner = ".".join(parts[:number])
            if part.startswith("_") and part != "__main__" and not f"{edge.importer}.".startswith(f"{owner}."):
                wrong.append(str(edge))
    assert wrong == []


def test_files_stay_short() -> None:
    kinds = {".py", ".c", ".h", ".js", ".css", ".html"}
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in sorted(ROOT.rglob("*"))
        if path.suffix in kinds and "vendor" not in path.parts
    }
    too_long = [name for name, lines in lengths.items() if lines > MAX_LINES]
    assert too_long == []


def test_files_that_are_called_slow_are_there() -> None:
    assert len(set(SLOW)) == len(SLOW) and [name for name in SLOW if not (Path(__file__).parent / name).is_file()] == []
