"""Where kernels are compiled for a GPU, the tests of Triton's interpreter run in processes of their own.

pytest tests/kernels/test_interpreter.py
"""

import pytest

from tests.kernels import interpreter

pytest.importorskip("triton")


@pytest.mark.skipif(interpreter.CHOSEN, reason="the interpreter is chosen for this process: each file runs by itself")
@pytest.mark.parametrize("name", interpreter.FILES)
def test_passes_in_the_interpreter(name):
    interpreter.run_tests(str(interpreter.HERE / name), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


def test_every_file_that_needs_the_interpreter_is_run():
    assert interpreter.FILES
    for path in interpreter.HERE.glob("test_*.py"):
        assert (path.name in interpreter.FILES) == ("\ninterpreter.require()\n" in path.read_text()), path.name
