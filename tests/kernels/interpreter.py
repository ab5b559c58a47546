"""Tests of Triton kernels without a GPU: through Triton's interpreter, which is chosen when kernels are defined.

Without a GPU, tests/conftest.py chooses it for all tests. With one, tests/kernels/test_interpreter.py runs those that
need it in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

CHOSEN = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent
FILES = (
    "test_triton_adapters.py",
    "test_triton_engine.py",
    "test_triton_experts.py",
    "test_triton_float8.py",
    "test_triton_quantized.py",
    "test_triton_retained.py",
    "test_triton_serving.py",
    "test_triton_sparse.py",
)


def require() -> None:
    """Called by each of FILES: skips the rest of it in a process whose kernels are compiled for a GPU."""
    if not CHOSEN:
        pytest.skip("needs TRITON_INTERPRET=1, as test_interpreter.py runs it", allow_module_level=True)
    from tests.kernels.quick_interpreter import make_quick

    make_quick()


def run_tests(file: str, **environment: str) -> None:
    """All tests of a file in a process of their own, under these variables of the environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-4000:]
