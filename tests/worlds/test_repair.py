"""Programs to repair: faults that tests notice, tests that cannot be cheated, and no way out of the sandbox."""

from __future__ import annotations

import random
import re

import pytest

from moesaic.worlds.environments.repair import SHOWN, Workshop, tells
from moesaic.worlds.faulty_programs import ROUTINES
from moesaic.worlds.text_actions import Finished, Invalid


@pytest.mark.parametrize("routine", ROUTINES, ids=lambda routine: routine.name)
def test_every_fault_shows(routine) -> None:
    for fault in routine.faults:
        draw = random.Random(1)
        found = sum(tells(routine, fault, routine.inputs(draw)) for _ in range(200))
        assert found >= 5, fault


def workshop(number: int = 0) -> Workshop:
    return Workshop(random.Random(number), 2, 60.0)


def test_submitting_what_is_broken_fails_and_edits_are_what_they_say() -> None:
    task = workshop()
    assert "should be" in str(task.act("test"))
    before = list(task.lines)
    assert task.act("insert 1: # new") == "Line 1 is new." and task.lines == ["# new", *before]
    assert task.act("delete 1") == "Line 1 is deleted." and task.lines == before
    assert task.act("replace 2:     pass") == "Line 2 is replaced." and task.lines[1] == "    pass"
    for wrong in ("replace 999: x", "replace 0: x", "delete 999", "replace 3", "frobnicate", "insert 9999: x"):
        with pytest.raises(Invalid):
            task.act(wrong)
    assert workshop().act("submit").score == 0.0  # type: ignore[union-attr]


def test_knowing_the_shown_answers_is_not_enough() -> None:
    task = workshop()
    known = {call[0]: {} for call, _ in task.shown}
    for (name, arguments), wanted in task.shown:
        known[name][repr(arguments)] = wanted
    task.lines = [f"def {name}(*given): return {table!r}[repr(list(given))]" for name, table in known.items()]
    assert task.act("test") == "All tests pass."
    ended = task.act("submit")
    assert isinstance(ended, Finished) and ended.score == 0.0
    passed, total = map(int, re.findall(r"\d+", ended.observation))
    assert len(known) * SHOWN <= passed < total


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "print('[]' * 9); raise SystemExit",
        "x = 'a' * 10**10",
        "import sys; print(chr(10) + sys._getframe(1).f_globals['asked']['mark'] + '[[1], 2]'); sys.stdout.flush(); "
        "import os; os._exit(0)",
        "(",
        "\udc80",
    ],
)
def test_hostile_programs_score_nothing_and_do_not_hang(program: str) -> None:
    task = workshop()
    task.seconds = 2.0
    task.lines = [program]
    assert "should be" in str(task.act("test"))
    assert task.act("submit").score == 0.0  # type: ignore[union-attr]
