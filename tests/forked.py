"""`moesaic` in processes of its own that start at once: forks of one that has imported everything and computed nothing.

    with_words = Forked(["train", "recipe.yaml", "--out", "out"], stdout=subprocess.PIPE)
    done = run(["show", "out"])

A process that starts from nothing imports torch for three seconds before it does what a test is about. How one starts
is tested where that is the matter: in tests/test_cli.py, serve/api/test_process.py, serve/cluster/test_deploy.py.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, reduction
from typing import Any, TextIO

from tests.figures import leave_blank
from tests.waiting import PATIENCE

# One server forks all that a test process wants forked, whoever asks it first: commands, ranks, workers, killed runs.
IMPORTED = [
    "matplotlib.figure",
    "moesaic.align.align",
    "moesaic.compress.compress",
    "moesaic.quickstart.tiny",
    "moesaic.serve.api.server",
    "moesaic.serve.cluster.preload",
    "moesaic.serve.group.engine",
    "moesaic.train.pretrain",
    "moesaic.train.report.plot",
    "pytest",
    "tests.parallel.launched",
    "transformers.modeling_layers",  # with which files of tests make models; it takes longest of all
]


def import_everything() -> None:
    """Into that server, beside what its first user wants there."""
    plain: Any = forkserver.set_forkserver_preload

    def preload(names: list[str]) -> None:
        plain(sorted({*names, *IMPORTED}))

    forkserver.set_forkserver_preload = preload
    preload([])


class Forked:
    """As `subprocess.Popen([sys.executable, "-m", "moesaic", *words], text=True)`, or of another function of words."""

    stdout: TextIO | None = None
    stderr: TextIO | None = None

    def __init__(
        self,
        words: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        env: dict[str, str] | None = None,
        function: Callable[[list[str]], int] | None = None,
    ) -> None:
        given, opened, files = (stdin, stdout, stderr), [], []
        for number, file in enumerate(given):
            if file == subprocess.PIPE:
                assert number, "write what it shall read into a file"
                read, file = os.pipe()
                opened.append(file)
                setattr(self, ("stdin", "stdout", "stderr")[number], os.fdopen(read, encoding="utf-8"))
            elif file == subprocess.DEVNULL:
                file = os.open(os.devnull, os.O_RDWR)
                opened.append(file)
            elif file == subprocess.STDOUT:
                file = files[1].number
            files.append(Passed(number if file is None else file))
        environment = dict(os.environ if env is None else env)
        forkserver.ensure_running()
        server = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
        arguments = (list(words), files, environment, os.getcwd(), function or moesaic, server)
        self.process = multiprocessing.get_context("forkserver").Process(target=begin, args=arguments, daemon=True)
        self.process.start()
        for file in opened:
            os.close(file)
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("moesaic", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float = PATIENCE) -> tuple[str | None, str | None]:
        """All that it says until its end."""
        said: dict[int, str] = {}

        def read(number: int, file: TextIO) -> None:
            with file:
                said[number] = file.read()

        files = {number: file for number, file in enumerate((self.stdout, self.stderr)) if file is not None}
        threads = [threading.Thread(target=read, args=one, daemon=True) for one in files.items()]
        for thread in threads:
            thread.start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return said.get(0), said.get(1)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` with `capture_output=True`."""
    process = Forked(words, subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE, **options)
    try:
        said = process.communicate()
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(words), process.wait(), *said)


class Passed:
    """A file of this process, by its number, for one that is forked from the server."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self.number),)


def _detached(passed: Any) -> int:
    number: int = passed.detach()
    return number


def begin(
    words: list[str],
    files: list[int],
    environment: dict[str, str],
    folder: str,
    function: Callable[[list[str]], int],
    server: str,
) -> None:
    multiprocessing.current_process().daemon = False  # it may have children of its own
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), encoding="utf-8")
    said = io.BufferedWriter(io.FileIO(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(said, "utf-8", "backslashreplace", line_buffering=True)
    own: Any = forkserver._forkserver
    own._forkserver_address = server  # which forks its children too
    own.ensure_running = forkserver.ensure_running = lambda: None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave_blank()
    code = function(words)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.exit(code)


def moesaic(words: list[str]) -> int:
    from moesaic.cli import main

    sys.argv = ["moesaic", *words]
    return main()
