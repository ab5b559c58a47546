import gc
import threading
import time

import pytest

from moesaic.python_syntax import parse_literal, parse_module

PROGRAM = "def f(x):\n    return ((x + 1) * (2 + (3 - x)))\n" * 5
LITERAL = "[" + ", ".join("{'a': (1, [2, (3,)])}" for _ in range(20)) + "]"


@pytest.mark.parametrize(("read", "text"), [(parse_module, PROGRAM), (parse_literal, LITERAL)])
def test_threads_read_at_the_same_time(read, text):
    """A collector's pass in the middle of a tree lets other threads go on: where Python errs, it errs here."""
    failures = []

    def reads() -> None:
        for _ in range(20):
            try:
                read(text)
            except SystemError as error:
                failures.append(error)

    def give_way(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.callbacks.append(give_way)
    gc.set_threshold(20)
    try:
        threads = [threading.Thread(target=reads) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(give_way)
    assert not failures


@pytest.mark.parametrize("text", ["f(1)", "1 +", "x", ""])
def test_what_is_no_literal_is_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        parse_literal(text)
