"""Puts the commands together: every file of this folder that defines `command` is one.

A command file reads

    '''What a model is, and its life so far.

        moesaic show out/smollm2
        moesaic show out/smollm2 --json
    '''
    ORDER = 20  # its place in the list: the life of a model runs from 0 to 99

    def command(directory: Annotated[Path, typer.Argument(metavar="DIR", help="...")], json: JsonFlag = False) -> None:
        '''Show what a model is, and its life so far.'''
        from moesaic.model import ...  # heavy imports go inside

        report = ...
        if json:
            print_json(report)

Its name is the file's (`_` becomes `-`), its summary the first line of `command`'s docstring, and the lines of the
file's docstring that begin with `moesaic ` are the examples in its help. `command` may also be a `typer.Typer` with
commands of its own.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

import moesaic

SUMMARY = "One system for the whole life of a mixture-of-experts language model."
EXAMPLES = [
    "moesaic convert smollm2 out/smollm2    SmolLM2-135M-Instruct, as a model directory",
    "moesaic show out/smollm2               parameters, layers, memory, lineage",
    "moesaic COMMAND --help                 all options of a command",
]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on standard output.")]
JSON_OUTPUT: ContextVar[TextIO] = ContextVar("JSON_OUTPUT")  # the true standard output while a command runs with --json


def print_json(report: object) -> None:
    """Print the one object of a command that was given `--json`."""
    print(json.dumps(_plain(report), indent=2), file=JSON_OUTPUT.get(sys.stdout))


def stopped(command: str, out: Path, resumable: bool) -> typer.Exit:
    """The end of a command stopped by Ctrl-C; `resumable`: what is done is saved, and need not be done again."""
    saved = f"Run the same command to resume; {out} keeps what is done."
    message = saved if resumable else "Nothing was saved yet; the same command starts from the beginning."
    print(f"moesaic {command}: stopped. {message}", file=sys.stderr)
    return typer.Exit(130)


def _plain(value: Any) -> Any:
    """JSON's own types; a number JSON cannot represent (infinity, nan) becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(entry) for entry in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "tolist"):  # numpy and torch
        return _plain(value.tolist())
    return str(value)


@dataclass(frozen=True)
class CommandFile:
    """What the list of commands shows of a command, read without importing it."""

    module: str
    summary: str
    examples: tuple[str, ...]
    order: int

    @property
    def name(self) -> str:
        return self.module.replace("_", "-")


def find_commands() -> dict[str, CommandFile]:
    """All commands by name, in the order of a model's life."""
    found = []
    for folder in importlib.import_module("moesaic.cli").__path__:
        for module in pkgutil.iter_modules([folder]):
            command = _read(Path(folder) / f"{module.name}.py") if not module.ispkg else None
            if command:
                found.append(command)
    return {command.name: command for command in sorted(found, key=lambda command: (command.order, command.name))}


def _read(path: Path) -> CommandFile | None:
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    text = ast.get_docstring(tree, clean=False) or ""
    examples = tuple(line.strip() for line in text.splitlines() if line.strip().startswith("moesaic "))
    summary, order, is_command = text.partition("\n")[0], 50, False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "command":
            is_command = True
            summary = (ast.get_docstring(node) or summary).partition("\n\n")[0].replace("\n", " ")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            is_command = is_command or "command" in names
            if "ORDER" in names and isinstance(node.value, ast.Constant):
                order = int(str(node.value.value))
    return CommandFile(path.stem, summary, examples, order) if is_command else None


def make_app(wanted: str | None = None, everything: bool = False) -> typer.Typer:
    """The app, in which only the command `wanted` is imported; the others are there for the list of commands."""
    app = typer.Typer(
        help=SUMMARY,
        epilog=_epilog(EXAMPLES),
        rich_markup_mode=None,  # plain help, which reads the same on a terminal and in a file
        context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
        add_completion=True,
    )
    app.callback(invoke_without_command=True)(_root)
    for command in find_commands().values():
        function: Callable[..., Any] | typer.Typer = _nothing
        if everything or command.name == wanted:
            function = importlib.import_module(f"moesaic.cli.{command.module}").command
        settings: dict[str, Any] = {"epilog": _epilog(command.examples), "short_help": command.summary.rstrip(".")}
        if isinstance(function, typer.Typer):
            app.add_typer(function, name=command.name, **settings)
        else:
            app.command(command.name, **settings)(function)
    return app


def _nothing() -> None:
    """Stands for a command that was not asked for."""


def _epilog(examples: list[str] | tuple[str, ...]) -> str | None:
    # A paragraph that begins with \b is not wrapped.
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples)]) if examples else None


def _version(asked: bool) -> None:
    if asked:
        print(f"moesaic {moesaic.__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; works after a command too.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
