"""Emergence by loss: planted thresholds are found, and nothing else is called one; and the command around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.train.law.coming import coming
from moesaic.train.law.emergence import Emergence, Point, emergence
from moesaic.train.law.loss_law import LossLaw
from moesaic.train.law.scores import read_points
from moesaic.train.schedules import curve
from moesaic.train.schedules.constant import Constant

AT, CHANCE, SLOPE, COUNT = 1.7, 0.06, 1.2, 200
CURVES = {
    "threshold": lambda loss: np.minimum(1, CHANCE + SLOPE * np.maximum(AT - loss, 0)),
    "line": lambda loss: 0.05 + 0.4 * (3 - loss),
    "bend": lambda loss: 0.02 + np.exp(1.8 * (1 - loss)),
    "flat": lambda loss: np.full_like(loss, CHANCE),
}


def drawn(kind: str, seed: int, lowest: tuple[float, ...] = (1.2, 1.35)) -> list[Point]:
    """Checkpoints of a run for each lowest loss, with binomial answers along a curve."""
    chance, points = np.random.default_rng(seed), []
    for number, end in enumerate(lowest):
        losses = np.linspace(3.0, end, 16)
        for step, (loss, share) in enumerate(zip(losses, CURVES[kind](losses)), 1):
            points.append(Point(f"run {number}", 20 * step, float(loss), chance.binomial(COUNT, share) / COUNT, COUNT))
    return points


class TestPlanted:
    @pytest.mark.parametrize("seed", range(3))
    def test_a_threshold_is_found_within_its_interval(self, seed: int) -> None:
        found = emergence(drawn("threshold", seed))
        assert found.seen and found.verdict == "threshold" and "until the loss falls below" in found.text()
        assert found.threshold == pytest.approx(AT, abs=0.05)
        assert found.low <= AT + 0.03 and found.high >= AT - 0.03 and found.high - found.low < 0.2
        assert found.chance == pytest.approx(CHANCE, abs=0.02) and found.slope == pytest.approx(SLOPE, rel=0.2)
        assert all(abs(run.crossed - truth) <= 20 for run, truth in zip(found.runs, (240, 260)))
        assert all(abs(run.threshold - AT) < 0.1 and abs(run.distance) < 0.05 for run in found.runs)

    @pytest.mark.parametrize("kind", ["line", "bend", "flat"])
    @pytest.mark.parametrize("seed", range(2))
    def test_what_has_no_threshold_is_not_called_emergence(self, kind: str, seed: int) -> None:
        found = emergence(drawn(kind, seed))
        assert not found.seen and found.verdict == kind and found.text().startswith("no emergence seen")

    def test_a_run_that_is_not_there_yet_shows_none(self) -> None:
        found = emergence(drawn("threshold", 0, lowest=(1.75, 1.8)))
        assert not found.seen and found.verdict == "flat"

    def test_a_size_that_leaves_chance_at_another_loss_is_told(self) -> None:
        points = drawn("threshold", 0)
        moved = [Point("other", p.step, p.loss + 0.5, p.score, p.count) for p in points if p.run == "run 0"]
        found = emergence([*points, *moved])
        own = {run.run: run.threshold for run in found.runs}
        assert own["other"] - own["run 0"] == pytest.approx(0.5, abs=0.15)
        assert any("apart" in warning for warning in found.warnings)
        assert not any("apart" in warning for warning in emergence(points).warnings)

    def test_the_score_of_guessing_may_be_known(self) -> None:
        assert emergence(drawn("threshold", 0), chance=CHANCE).chance == CHANCE

    def test_too_few_checkpoints(self) -> None:
        with pytest.raises(UserError, match="too few"):
            emergence(drawn("threshold", 0)[:5])


LAW = LossLaw(L0=1.2, A=0.4, alpha=0.6, B=0.0, C=1.0, beta=0.6, gamma=0.6)
PEAK, STEPS = 1e-2, 400


@pytest.fixture(scope="module")
def found() -> Emergence:
    return emergence(drawn("threshold", 0))


def write_run(run: Path, seed: int = 0) -> Path:
    """A run that follows the law, with scores along the planted curve of its loss."""
    run.mkdir()
    losses = LAW.predict(np.full(STEPS, PEAK))
    chance = np.random.default_rng(seed)
    lines = [{"step": 1 + step, "lr": PEAK, "loss": float(loss)} for step, loss in enumerate(losses)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    scores = []
    for step in range(20, STEPS + 1, 10):
        share = float(chance.binomial(COUNT, float(CURVES["threshold"](losses[step - 1 : step])[0]))) / COUNT
        numbers = {"accuracy": share, "examples": COUNT, "by_kind": {"a": 1.0, "b": share}}
        scores.append({"step": step, "suite": "tasks", "options": {"family": "sums"}, "numbers": numbers})
    (run / "scores.jsonl").write_text("\n".join(map(json.dumps, scores)) + "\n")
    return run


class TestWhen:
    def test_the_step_is_where_the_law_falls_below_the_threshold(self, found: Emergence, tmp_path: Path) -> None:
        LAW.save(tmp_path / "law.json", peak=PEAK, peaks=[PEAK], steps=STEPS, warmup=0, loss="loss")
        told = coming(found, tmp_path / "law.json", "constant", STEPS)
        losses = LAW.predict(curve(Constant(), STEPS, 0, PEAK))
        assert told["step"] == 1 + int(np.flatnonzero(losses < found.threshold)[0])
        assert told["early"] <= told["step"] <= told["late"]
        assert told["final_score"] == pytest.approx(float(CURVES["threshold"](losses[-1:])[0]), abs=0.08)
        assert coming(found, tmp_path / "law.json", "constant", 10)["step"] is None
        with pytest.raises(UserError, match="loss/held_out"):
            coming(found, tmp_path / "law.json", "constant", STEPS, "loss/held_out")


class TestCommand:
    def test_reads_the_life_of_runs(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        runs = [str(write_run(tmp_path / name, seed)) for seed, name in enumerate("ab")]
        LAW.save(tmp_path / "law.json", peak=PEAK, peaks=[PEAK], steps=STEPS, warmup=0, loss="loss")
        law = ["--law", str(tmp_path / "law.json"), "--steps", "400", "--png", str(tmp_path / "made.png")]
        assert main(["law", "emerge", *runs, "--window", "1", *law, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["seen"] and told["threshold"] == pytest.approx(AT, abs=0.05) and told["coming"]["step"] > 0
        assert told["suite"]["options"] == {"family": "sums"}
        assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")
        assert main(["law", "emerge", *runs, "--score", "by_kind.a"]) == 0
        assert "no emergence seen" in capsys.readouterr().out
        points, _ = read_points(runs, key="by_kind.b", window=1)
        assert points[0].count == COUNT // 2 and points[0].step == 20

    def test_mistakes_are_told(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        run = write_run(tmp_path / "a")
        for more, told in (
            (["--suite", "math"], "no scores of math"),
            (["--score", "acuracy"], "accuracy"),
            (["--law", "law.json"], "--steps"),
        ):
            assert main(["law", "emerge", str(run), *more]) == 2
            assert told in capsys.readouterr().err
        (run / "scores.jsonl").unlink()
        assert main(["law", "emerge", str(run)]) == 2
        assert "moesaic evaluate RUN" in capsys.readouterr().err
