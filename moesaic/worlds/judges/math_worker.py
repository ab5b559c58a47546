"""A process that compares mathematics, one pair per line: it can be killed, which a thread cannot.

math-verify's own time limits work by signals, in the main thread only, and cannot interrupt a computation in C.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import IO, Any

STARTING = 120.0  # seconds until sympy is read, on a busy machine


class MathWorker:
    """The process as seen from outside; started when first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def equal(self, truth: str, said: str, seconds: float) -> bool:
        with self._lock:
            process = self._started()
            assert process.stdin and process.stdout
            process.stdin.write(json.dumps([truth, said]).encode() + b"\n")
            process.stdin.flush()
            try:
                verdict = _line(process.stdout, seconds)
            except BaseException:
                self._process = None
                _end(process)
                raise
        if isinstance(verdict, str):
            raise ValueError(verdict)
        return bool(verdict)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert process.stdout
            weakref.finalize(self, _end, process)
            try:
                problem = _line(process.stdout, STARTING)
            except BaseException:
                _end(process)
                raise
            if problem:
                _end(process)
                raise ModuleNotFoundError(str(problem))
            self._process = process
        return self._process


def _line(stream: IO[bytes], seconds: float) -> Any:
    end = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        if not selector.select(max(0.0, end - time.monotonic())):
            raise TimeoutError(f"not compared after {seconds:g} s")
    line = stream.readline()  # a verdict is written whole
    if not line:
        raise ChildProcessError("the comparison took too much memory or crashed")
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream:
            stream.close()


def _compare(truth: str, said: str) -> bool:
    from math_verify import parse, verify

    # Without dollars a formula is not taken for one; what is not a formula is read as plain text.
    forms = [truth] if "$" in truth or "\\boxed" in truth else [f"${truth}$", truth]
    gold = next((parsed for form in forms if (parsed := parse(form, parsing_timeout=None))), None)
    if not gold:
        raise ValueError(f"the right answer {truth!r} is not mathematics")
    for form in [said] if "$" in said or "\\boxed" in said else [said, f"${said}$"]:
        if verify(gold, parse(form, parsing_timeout=None), timeout_seconds=None):
            return True
    return False


def _serve() -> None:
    """Answer pairs until nobody asks any more."""
    import os
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no verdict
    try:
        import math_verify  # noqa: F401

        print("null", file=replies, flush=True)
    except ImportError as error:
        print(json.dumps(f"the package math-verify is not installed ({error})"), file=replies, flush=True)
        return
    for line in sys.stdin.buffer:
        try:
            verdict: bool | str = _compare(*json.loads(line))
        except Exception as error:
            verdict = str(error) or type(error).__name__
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
