"""A server in a process of its own, for a benchmark or a test."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from moesaic.errors import UserError


@contextmanager
def serving(directory: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """Serve a model directory on a free port; its address."""
    if not directory.is_dir():
        raise UserError(directory, "is neither a URL nor a model directory")
    command = [
        sys.executable,
        "-m",
        "moesaic",
        "serve",
        str(directory),
        "--port",
        "0",
        "--drain-seconds",
        "5",
        *options,
    ]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            url = next((word for line in process.stdout for word in line.split() if word.startswith("http://")), None)
            if url is None:
                errors.seek(0)
                lines = errors.read().strip().splitlines() or ["it ended at once"]
                raise UserError(directory, f"cannot be served ({lines[-1]})")
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
