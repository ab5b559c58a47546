"""Quick ideas are removed in every run of the suite; `python -m tests.mutations` removes all of them."""

from __future__ import annotations

import pytest

from tests.ideas import IDEAS, Idea
from tests.mutations import Stale, outcome, removed, survives


@pytest.mark.parametrize(
    "idea", [pytest.param(idea, id=f"{idea.method}: {idea.idea}") for idea in IDEAS if not idea.slow]
)
def test_an_idea_is_missed_when_it_is_gone(idea: Idea) -> None:
    assert survives(idea) == "", f"{idea.test} did not notice"


def test_a_survivor_is_told_from_what_is_noticed_or_crashes() -> None:
    from moesaic.train.schedules.linear import Linear

    def changed(has: str, without: str, test: str = "train/test_schedules.py::test_values_worked_out_by_hand") -> str:
        return survives(Idea("train/schedules/linear", "", has, without, test))

    falls = "progress(step, steps)"
    assert changed(falls, f"2 * {falls}") == ""
    assert changed(falls, f"1.0 * {falls}") == "survived"
    assert changed(falls, "1 / 0").startswith("crashed (ZeroDivisionError")
    assert changed("return 1", "assert False\n        return 1").startswith(
        "crashed (AssertionError"
    )  # not a test's own
    assert "0 times" in changed("no such text", "")
    assert "same functions" in changed("A straight fall", "A fall")
    assert changed(falls, f"2 * {falls}", "train/test_schedules.py::test_that_is_not_there") == "no such test ran"
    with removed(Idea("train/schedules/linear", "", falls, f"2 * {falls}", "")):
        assert Linear().factor(1, 4) == 0.5  # for whoever holds the class already
    assert Linear().factor(1, 4) == 0.75
    with pytest.raises(Stale), removed(Idea("train/schedules/none", "", "text", "", "")):
        raise AssertionError
    assert outcome(["train/test_schedules.py::test_warmup_rises_in_equal_steps_to_the_first_rate"]).passed == 1
