"""Python's own documentation as files, without a network: the language reference that `help()` shows, and docstrings.

write_python_documents(Path("out/python"))
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from moesaic.errors import UserError
from moesaic.python_syntax import parse_module

# What people ask about; all of it together would take minutes to embed on two cores.
MODULES = (
    *("bisect", "contextlib", "csv", "dataclasses", "enum", "functools", "glob", "gzip", "heapq", "json/__init__"),
    *("multiprocessing/pool", "pickle", "queue", "random", "re", "re/__init__", "secrets", "shutil", "string"),
    *("subprocess", "tempfile", "textwrap", "uuid"),
)
REFERENCE = ("assert", "async", "for", "function", "global", "lambda", "raise", "strings", "try", "with", "yield")
TOPICS = "pydoc_data/topics"
SHORTEST = 40  # characters of a docstring that says something


def write_python_documents(folder: Path, modules: tuple[str, ...] = MODULES) -> int:
    """Write them below `folder`; how many there are. Sources are parsed, and nothing of them is run."""
    library = Path(sysconfig.get_paths()["stdlib"])
    folder.mkdir(parents=True, exist_ok=True)
    written = 0
    for name, text in (*topics(library), *((name, module_text(library, name)) for name in modules)):
        if text:
            plain = name.removesuffix("/__init__").replace("/", ".")
            (folder / f"{plain}{'.rst' if name.startswith('reference') else '.md'}").write_text(text, encoding="utf-8")
            written += 1
    if not written:
        raise UserError(library, "holds no sources of Python's library", "Name a folder of texts with --folder.")
    return written


def topics(library: Path) -> Iterator[tuple[str, str]]:
    tree = parsed(library / f"{TOPICS}.py")
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                if name in REFERENCE:
                    yield f"reference-{name}", str(text)


def module_text(library: Path, name: str) -> str:
    tree = parsed(library / f"{name}.py")
    if tree is None:
        return ""
    shown = name.removesuffix("/__init__").replace("/", ".")
    parts = [f"# {shown}", ast.get_docstring(tree) or ""]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            parts += described(node, f"{shown}.{node.name}")
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
                    parts += described(inner, f"{shown}.{node.name}.{inner.name}")
    return "\n\n".join(part for part in parts if part) + "\n"


def described(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, name: str) -> list[str]:
    text = ast.get_docstring(node) or ""
    if len(text) < SHORTEST:
        return []
    arguments = "" if isinstance(node, ast.ClassDef) else f"({ast.unparse(node.args)})"
    return [f"## {name}", f"`{name}{arguments}`", text]


def parsed(file: Path) -> ast.Module | None:
    try:
        return parse_module(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
