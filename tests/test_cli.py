"""The command line, seen from outside: what it prints where, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

import moesaic
from moesaic import cli
from moesaic.cli import main
from moesaic.cli.app import find_commands
from tests.waiting import PATIENCE


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]

COMMANDS = {
    "greet": '''
        """Say hello.

            moesaic greet Ada
            moesaic greet Ada --json
        """

        from typing import Annotated

        import typer

        from moesaic.cli.app import JsonFlag, print_json

        ORDER = 1


        def command(
            name: Annotated[str, typer.Argument(metavar="NAME", help="Who is greeted.")],
            times: Annotated[int, typer.Option(help="How often.")] = 1,
            json: JsonFlag = False,
        ) -> None:
            """Greet somebody
            by name.

            As often as you like.
            """
            print("a library that prints")
            if name == "nobody":
                from moesaic.errors import UserError

                raise UserError("NAME", "there is nobody to greet", "Give the name of somebody.")
            if json:
                print_json({"name": name, "times": times, "ratio": float("nan")})
    ''',
    "fail_now": '''
        """Go wrong."""

        import errno

        from moesaic.errors import UserError


        def command(how: str) -> None:
            """Go wrong in a given way."""
            if how == "bug":
                raise ValueError("first line\\nsecond line")
            if how == "silent":
                raise ValueError
            if how == "long":
                raise UserError("out/model.safetensors", "truncated " * 12, "Copy it\\nagain.")
            if how == "interrupt":
                raise KeyboardInterrupt
            if how == "import":
                try:
                    raise KeyboardInterrupt
                except KeyboardInterrupt:
                    raise ImportError("initialization failed")
            if how == "disk":
                raise OSError(errno.ENOSPC, "No space left on device", "out/model.safetensors")
            if how == "memory":
                raise MemoryError
            if how == "exit":
                import typer

                raise typer.Exit(7)
    ''',
    "several": '''
        """A command with parts."""

        import typer

        ORDER = 2
        command = typer.Typer()


        @command.command()
        def fit(path: str) -> None:
            """Fit."""
            raise KeyError(path)


        @command.command()
        def predict() -> None:
            """Predict."""
            print("predicted")
    ''',
    "heavy": '''
        """Import what must not be imported for the list of commands."""

        import package_that_does_not_exist


        def command() -> None:
            """Need a lot."""
    ''',
    "not_a_command": "VALUE = 1",
}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The real command line with a few more commands."""
    for name, text in COMMANDS.items():
        (tmp_path / f"{name}.py").write_text(dedent(text))
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    yield tmp_path
    for name in COMMANDS:
        sys.modules.pop(f"moesaic.cli.{name}", None)


@pytest.fixture
def run(commands: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*words: str) -> Ended:
        code = main(words)
        return Ended(code, *capsys.readouterr())

    return run


def in_process(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *code.split(), *words], capture_output=True, text=True, timeout=PATIENCE)


class TestHelp:
    @pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
    def test_lists_every_command_with_its_summary(self, run: Run, words: tuple[str, ...]) -> None:
        ended = run(*words)
        assert ended.code == 0
        assert ended.err == ""
        for shown in ("greet", "Greet somebody by name", "fail-now", "Go wrong in a given way"):
            assert shown in ended.out
        assert "not-a-command" not in ended.out
        assert "Examples:" in ended.out

    def test_commands_are_in_the_order_of_a_models_life(self, commands: Path) -> None:
        ours = [name for name in find_commands() if name.replace("-", "_") in COMMANDS]
        assert ours == ["greet", "several", "fail-now", "heavy"]

    def test_does_not_import_the_commands_it_lists(self, run: Run) -> None:
        assert "heavy" in run("--help").out
        assert run("greet", "Ada").code == 0
        assert run("heavy").code == 1

    def test_shows_options_and_examples_of_a_command(self, run: Run) -> None:
        out = run("greet", "--help").out
        assert "As often as you like." in out
        assert "NAME" in out
        assert "--times" in out
        assert "--json" in out
        assert "\n    moesaic greet Ada\n    moesaic greet Ada --json" in out

    def test_is_plain_text(self, run: Run) -> None:
        for words in ((), ("greet", "--help")):
            out = run(*words).out
            assert out.isascii()
            assert "\x1b" not in out

    def test_waits_for_neither_torch_nor_pydantic(self) -> None:
        loaded = "from moesaic.cli import main; import sys; main(['--help']); print(*sys.modules)"
        modules = in_process("-c", loaded).stdout.splitlines()[-1].split()
        assert "typer" in modules
        assert not {"torch", "transformers", "numpy"} & set(modules)


def test_threads_that_wait_do_not_spin_for_long_unless_told_to() -> None:
    for told, added in (
        ({}, {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}),
        ({"GOMP_SPINCOUNT": "7"}, {"KMP_BLOCKTIME": "1"}),
        ({"OMP_WAIT_POLICY": "active"}, {}),
    ):
        environment = dict(told)
        cli.limit_spinning(environment)
        assert environment == told | added


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"moesaic {moesaic.__version__}\n", "")


def test_runs_as_a_module() -> None:
    ended = in_process("-m moesaic", "--version")
    assert (ended.returncode, ended.stdout) == (0, f"moesaic {moesaic.__version__}\n")


class TestWrongRequests:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("greet", "nobody"), "moesaic greet: NAME: there is nobody to greet. Give the name of somebody.\n"),
            (("greet",), "moesaic greet: missing argument 'NAME'. See moesaic greet --help.\n"),
            (("gret", "Ada"), "moesaic: no such command 'gret'. Did you mean 'greet'? See moesaic --help.\n"),
            (("fail_now",), "moesaic: no such command 'fail_now'. Did you mean 'fail-now'? See moesaic --help.\n"),
        ],
    )
    def test_are_told_in_a_line_and_exit_with_2(self, run: Run, words: tuple[str, ...], message: str) -> None:
        ended = run(*words)
        assert (ended.code, ended.err) == (2, message)

    @pytest.mark.parametrize(
        "words",
        [("greet", "Ada", "--tims", "2"), ("greet", "Ada", "--times", "x"), ("greet", "a", "b"), ("--nonsense",)],
    )
    def test_about_options_too(self, run: Run, words: tuple[str, ...]) -> None:
        ended = run(*words)
        assert ended.code == 2
        assert ended.out == ""
        assert ended.err.startswith("moesaic greet: " if words[0] == "greet" else "moesaic: ")
        assert len(ended.err.splitlines()) <= 2
        assert ended.err.endswith(" --help.\n")

    def test_a_long_message_has_its_remedy_on_a_second_line(self, run: Run) -> None:
        lines = run("fail-now", "long").err.splitlines()
        assert len(lines) == 2
        assert lines[0].startswith("moesaic fail-now: out/model.safetensors: truncated")
        assert lines[1] == "  Copy it again."


class TestWhereToWrite:
    DIRECTORIES = (
        "train recipe.yaml --out",
        "align recipe.yaml --model base --out",
        "quantiles recipe.yaml --out",
        "prepare recipe.yaml --out",
        "evaluate base --out",
        "compress base --out",
        "quickstart --no-serve --out",
        "convert base",
    )
    FILES = ("law fit a b --out", "law predict law.json --png", "law optimize law.json --steps 9 --out")

    @pytest.mark.parametrize("words", DIRECTORIES)
    def test_a_file_is_no_directory_and_neither_is_nothing(self, run: Run, tmp_path: Path, words: str) -> None:
        (tmp_path / "file").write_text("kept")
        for place in (tmp_path / "file", tmp_path / "file" / "below"):
            ended = run(*words.split(), str(place))
            told = " ".join(ended.err.split())  # a long line is wrapped
            assert ended.code == 2 and f"{tmp_path / 'file'}: is a file. Name a directory." in told
        ended = run(*words.split(), "")
        assert ended.code == 2 and "the name of a directory is empty" in ended.err
        assert (tmp_path / "file").read_text() == "kept"

    @pytest.mark.parametrize("words", FILES)
    def test_a_directory_is_no_file_and_neither_is_nothing(self, run: Run, tmp_path: Path, words: str) -> None:
        ended = run(*words.split(), str(tmp_path))
        assert ended.code == 2 and f"{tmp_path}: is a directory. Name a file." in " ".join(ended.err.split())
        ended = run(*words.split(), "")
        assert ended.code == 2 and "the name of a file is empty" in ended.err


def test_an_output_without_a_sign_for_something_shows_the_rest() -> None:
    command = [sys.executable, "-c", "import sys; from moesaic.cli import main; sys.exit(main(['doctor']))"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    assert done.returncode == 0 and "torch" in done.stdout and "internal error" not in done.stderr


@pytest.mark.parametrize("name", ["bench", "law"])
def test_a_group_of_commands_without_one(run: Run, name: str) -> None:
    assert run(name) == (2, "", f"moesaic {name}: missing command. See moesaic {name} --help.\n")


class TestFailedWork:
    @pytest.mark.parametrize(
        ("how", "code", "message"),
        [
            ("bug", 1, "internal error: ValueError: first line second line; run again with --debug for the traceback"),
            ("silent", 1, "internal error: ValueError; run again with --debug for the traceback"),
            ("disk", 1, "out/model.safetensors: no space left on device"),
            ("memory", 1, "out of memory"),
            ("interrupt", 130, "stopped"),
            ("import", 130, "stopped"),
        ],
    )
    def test_is_told_without_a_traceback(self, run: Run, how: str, code: int, message: str) -> None:
        assert run("fail-now", how) == (code, "", f"moesaic fail-now: {message}\n")

    def test_a_command_may_choose_its_exit_code(self, run: Run) -> None:
        assert run("fail-now", "exit") == (7, "", "")

    @pytest.mark.parametrize(
        "words", [("--debug", "fail-now", "bug"), ("fail-now", "--debug", "bug"), ("fail-now", "bug", "--debug")]
    )
    def test_debug_shows_the_traceback_wherever_it_stands(self, run: Run, words: tuple[str, ...]) -> None:
        ended = run(*words)
        assert ended.code == 1
        assert ended.out == ""
        assert "Traceback (most recent call last)" in ended.err
        assert 'raise ValueError("first line' in ended.err

    def test_debug_after_a_double_dash_belongs_to_the_command(self, run: Run) -> None:
        ended = run("fail-now", "--", "--debug")
        assert ended == (0, "", "")

    def test_parts_of_a_command_are_told_alike(self, run: Run) -> None:
        assert run("several", "predict") == (0, "predicted\n", "")
        assert run("several", "fit", "x").err.startswith("moesaic several: internal error: KeyError: 'x'; run again")
        assert "Traceback" in run("several", "fit", "x", "--debug").err
        assert run("several", "fti").code == 2


class TestJson:
    def test_is_all_there_is_on_standard_output(self, run: Run) -> None:
        ended = run("greet", "Ada", "--json")
        assert ended.code == 0
        assert json.loads(ended.out) == {"name": "Ada", "times": 1, "ratio": None}
        assert "a library that prints" in ended.err

    def test_leaves_standard_output_empty_on_an_error(self, run: Run) -> None:
        ended = run("greet", "nobody", "--json")
        assert (ended.code, ended.out) == (2, "")
        assert "there is nobody to greet" in ended.err

    def test_without_it_printing_is_as_ever(self, run: Run) -> None:
        assert run("greet", "Ada") == (0, "a library that prints\n", "")

    def test_takes_what_reports_are_made_of(self, capsys: pytest.CaptureFixture[str]) -> None:
        from dataclasses import dataclass

        import numpy

        @dataclass
        class Size:
            layers: int
            path: Path

        report = {"size": Size(3, Path("a/b")), "load": numpy.ones(2), 1: (True, None), "worst": float("inf")}
        cli.app.print_json(report)
        assert json.loads(capsys.readouterr().out) == {
            "size": {"layers": 3, "path": "a/b"},
            "load": [1.0, 1.0],
            "1": [True, None],
            "worst": None,
        }


class TestAsAProcess:
    PROGRAM = dedent("""
        import sys
        from moesaic import cli
        cli.__path__.append(sys.argv.pop(1))
        sys.exit(cli.main())
    """)

    def start(self, commands: Path, name: str) -> subprocess.Popen[str]:
        """A command that is a file of its own, as its own process."""
        arguments = [sys.executable, "-c", self.PROGRAM, str(commands), name]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_a_reader_that_leaves_is_no_error(self, tmp_path: Path) -> None:
        (tmp_path / "talk.py").write_text("def command():\n    for line in range(100_000):\n        print(line)\n")
        process = self.start(tmp_path, "talk")
        assert process.stdout
        assert process.stderr
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(PATIENCE) == 141
        assert errors == ""

    def test_ctrl_c_ends_with_one_line(self, tmp_path: Path) -> None:
        (tmp_path / "wait.py").write_text(
            "import time\ndef command():\n    print('waiting', flush=True)\n    time.sleep(900)\n"
        )
        process = self.start(tmp_path, "wait")
        assert process.stdout
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130
        assert errors == "moesaic wait: stopped\n"


def test_the_package_names_only_what_it_has() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        moesaic.Modle
    assert {"Model", "load", "__version__"} <= set(dir(moesaic))
