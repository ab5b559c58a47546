"""Schedules: bounds, shape and hand-worked values, and the schedule file."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.train.schedules import Schedule, curve
from moesaic.train.schedules.constant import Constant
from moesaic.train.schedules.cosine import Cosine
from moesaic.train.schedules.from_file import FromFile
from moesaic.train.schedules.linear import Linear
from moesaic.train.schedules.moderate import Moderate
from moesaic.train.schedules.wsd import WarmupStableDecay
from moesaic.train.schedules.wsd_power import WarmupStablePowerDecay
from tests.matrix import SCHEDULES, filled

share = st.floats(0.01, 1.0)
floors = st.floats(0.0, 1.0)
falling = st.one_of(
    st.builds(Linear, floors),
    st.builds(Cosine, floors),
    st.builds(WarmupStableDecay, share, share, st.sampled_from(["linear", "sqrt", "cosine", "exponential"])),
    st.builds(WarmupStablePowerDecay, share, floors, st.floats(0.1, 5.0)),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "written.json"
    path.write_text(json.dumps({"factors": curve(Cosine(), 40).tolist()}))
    return path


@pytest.mark.parametrize("name", SCHEDULES)
class TestEverySchedule:
    def test_begins_at_the_peak_and_never_rises(self, name: str, file: Path) -> None:
        schedule = build(Method(name, filled(SCHEDULES[name], schedule=file)), Schedule, "recipe")
        factors = [schedule.factor(step, 40) for step in range(41)]
        assert factors[0] == 1.0
        assert all(0 <= later <= earlier for earlier, later in pairwise(factors))
        assert factors[-1] < 1 or name == "constant"

    def test_is_the_same_from_a_file(self, name: str, file: Path, tmp_path: Path) -> None:
        schedule = build(Method(name, filled(SCHEDULES[name], schedule=file)), Schedule, "recipe")
        rates = curve(schedule, 40, peak=3e-3)
        (tmp_path / "again.json").write_text(json.dumps({"learning_rates": rates.tolist(), "peak": 3e-3}))
        np.testing.assert_allclose(curve(FromFile(str(tmp_path / "again.json")), 40, peak=3e-3), rates)

    def test_needs_no_options_but_a_file(self, name: str) -> None:
        if name == "from_file":
            with pytest.raises(UserError, match="recipe: path: missing"):
                build(Method(name), Schedule, "recipe")
        else:
            assert build(Method(name), Schedule, "recipe").factor(0, 10) == 1.0


@given(falling, st.integers(1, 400))
def test_falls_from_the_peak_to_the_floor(schedule: Any, steps: int) -> None:
    factors = [schedule.factor(step, steps) for step in range(steps + 1)]
    assert factors[0] == pytest.approx(1.0)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(factors))
    assert min(factors) >= schedule.floor - 1e-12
    assert factors[-1] == pytest.approx(schedule.floor, abs=1e-12)


@given(share, share, st.integers(1, 400))
def test_stays_at_the_peak_until_the_decay(decay: float, end: float, steps: int) -> None:
    for schedule in (
        WarmupStableDecay(decay),
        WarmupStablePowerDecay(decay),
        Moderate(end, decay),
    ):
        for step in range(int((1 - decay) * steps) + 1):
            assert schedule.factor(step, steps) == pytest.approx(1.0, abs=1e-9)
        if decay < 0.99 and (1 - decay) * steps + 1 < steps:
            assert schedule.factor(steps - 1, steps) < 1 or end == 1


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        (Constant(), 99, 1.0),
        (Linear(), 25, 0.75),
        (Linear(floor=0.2), 75, 0.4),
        (Cosine(floor=0.0), 50, 0.5),
        (Cosine(floor=0.1), 50, 0.55),
        (Cosine(floor=0.0), 25, (1 + math.sqrt(0.5)) / 2),
        (WarmupStableDecay(), 80, 1.0),
        (WarmupStableDecay(), 90, 0.5),
        (WarmupStableDecay(decay=0.4, floor=0.2), 80, 0.6),
        (WarmupStableDecay(shape="sqrt"), 85, 0.5),
        (WarmupStableDecay(shape="cosine"), 90, 0.5),
        (WarmupStableDecay(floor=0.01, shape="exponential"), 90, 0.1),
        (WarmupStablePowerDecay(power=2.0), 90, 0.25),
        (WarmupStablePowerDecay(), 95, 0.125),
        (Moderate(), 100, 1 / 3),
        (Moderate(end=0.5, decay=1.0), 50, 0.75),
    ],
    ids=str,
)
def test_values_worked_out_by_hand(schedule: Schedule, step: int, expected: float) -> None:
    assert schedule.factor(step, 100) == pytest.approx(expected)


def test_warmup_rises_in_equal_steps_to_the_first_rate() -> None:
    rates = curve(Linear(), steps=8, warmup=3, peak=4.0)
    np.testing.assert_allclose(rates, [1.0, 2.0, 3.0, 4.0, 3.2, 2.4, 1.6, 0.8])
    np.testing.assert_allclose(curve(Constant(), 3, 0, 2.0), [2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="warm-up must be shorter than the run, found 3 of 3 steps"):
        curve(Linear(), steps=3, warmup=3)


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        (Linear, {"floor": -0.1}, "floor must be from 0 to 1, found -0.1"),
        (Cosine, {"floor": 1.5}, "floor must be from 0 to 1"),
        (Cosine, {"floor": math.nan}, "floor must be"),
        (WarmupStableDecay, {"decay": 0.0}, "decay must be above 0 and at most 1, found 0"),
        (WarmupStableDecay, {"shape": "exponential"}, "give it a floor"),
        (WarmupStablePowerDecay, {"power": 0.0}, "power must be above 0"),
        (Moderate, {"end": 0.0}, "end must be above 0"),
        (Moderate, {"decay": 2.0}, "decay must be"),
    ],
)
def test_refuses_bad_options(kind: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        kind(**options)


def test_a_bad_option_in_a_recipe_names_its_place() -> None:
    with pytest.raises(UserError, match="mine.yaml: schedule: decay must be above 0"):
        build(Method("wsd", {"decay": 0.0}), Schedule, "mine.yaml", ("schedule",))


class TestFromFile:
    def write(self, folder: Path, content: object) -> str:
        path = folder / "schedule.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    def test_gives_back_what_was_written(self, tmp_path: Path) -> None:
        factors = curve(WarmupStablePowerDecay(), 37).tolist()
        schedule = FromFile(self.write(tmp_path, {"factors": factors}))
        np.testing.assert_array_equal(curve(schedule, 37), factors)
        assert schedule.factor(37, 37) == factors[-1]

    def test_is_found_by_name_and_takes_no_other_option(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, {"factors": [1.0, 0.5]})
        assert build(Method("from_file", {"path": path}), Schedule, "x").factor(1, 2) == 0.5
        with pytest.raises(UserError, match="no such option of from_file"):
            build(Method("from_file", {"path": path, "factors": [1.0]}), Schedule, "x")

    def test_learning_rates_become_shares_of_the_peak(self, tmp_path: Path) -> None:
        named = FromFile(self.write(tmp_path, {"learning_rates": [2e-3, 1e-3], "peak": 4e-3}))
        assert named.factors == pytest.approx((0.5, 0.25))
        assert FromFile(self.write(tmp_path, {"learning_rates": [2e-3, 1e-3]})).factors == pytest.approx((1.0, 0.5))

    def test_another_number_of_steps_is_an_error_unless_interpolated(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, {"factors": [1.0, 0.6, 0.2]})
        with pytest.raises(UserError, match="holds 3 steps, and the run has 5 after warm-up.*interpolate: true"):
            curve(FromFile(path), 5)
        np.testing.assert_allclose(curve(FromFile(path, interpolate=True), 5), [1.0, 0.8, 0.6, 0.4, 0.2])
        np.testing.assert_allclose(curve(FromFile(path, interpolate=True), 2), [1.0, 0.2])
        np.testing.assert_allclose(curve(FromFile(path, interpolate=True), 1), [1.0])

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ("{", "is not JSON"),
            ([1.0], "holds a list, not a JSON object"),
            ({"factors": [1.0], "learning_rates": [1.0]}, "factors or with learning_rates"),
            ({"factors": []}, "must be a list of numbers"),
            ({"factors": [1.0, "a"]}, 'step 1 is "a", not a number'),
            ({"factors": [1.0, -0.5]}, "step 1 is -0.5"),
            ({"factors": [1.0, True]}, "step 1 is true"),
            ('{"factors": [1.0, NaN]}', "step 1 is NaN"),
            ({"factors": [1.5]}, "rise to 1.5, above the peak of 1"),
            ({"learning_rates": [0.0]}, "the peak is 0.0, not a number above 0"),
        ],
    )
    def test_refuses_what_is_no_schedule(self, tmp_path: Path, content: object, problem: str) -> None:
        path = self.write(tmp_path, content)
        with pytest.raises(UserError, match=problem):
            build(Method("from_file", {"path": path}), Schedule, "x")

    def test_says_that_a_file_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no such file. moesaic law optimize writes a schedule file"):
            FromFile(str(tmp_path / "none.json"))
        with pytest.raises(ValueError, match="is not a file"):
            FromFile(str(tmp_path))
