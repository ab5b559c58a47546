"""Tests of Triton kernels without a GPU: through Triton's interpreter, which is chosen when kernels are defined.

Without a GPU, tests/conftest.py chooses it for all tests. With one, those that need it run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.waiting import PATIENCE

CHOSEN = os.environ.get("TRITON_INTERPRET") == "1"


def run_tests(file: str, **environment: str) -> None:
    """All tests of a file in a process of their own, under these variables of the environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:]
