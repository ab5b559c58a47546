"""The loss law: the formula, what a fit recovers, what the optimum is worth, and the commands around them."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.train.law import loss_law
from moesaic.train.law.fit import fit, score
from moesaic.train.law.loss_law import Array, LossLaw, load_law
from moesaic.train.law.optimize import final_and_slope, optimize
from moesaic.train.law.runs import LossCurve, read_run, smooth, warmup_steps
from moesaic.train.schedules import Schedule, curve
from moesaic.train.schedules.constant import Constant
from moesaic.train.schedules.cosine import Cosine
from moesaic.train.schedules.from_file import FromFile
from moesaic.train.schedules.linear import Linear
from moesaic.train.schedules.wsd import WarmupStableDecay
from moesaic.train.schedules.wsd_power import WarmupStablePowerDecay

# The second is what the paper's authors publish for their model of 100 million parameters. The others are made up; what
# a decay gains with the third comes seven times more slowly than in any of theirs.
LAWS = {
    "fast": (LossLaw(L0=1.8, A=0.4, alpha=0.7, B=30, C=2.0, beta=1.2, gamma=0.3), 5e-3),
    "paper": (LossLaw(L0=2.651, A=0.601, alpha=0.453, B=437.946, C=2.132, beta=0.598, gamma=0.655), 3e-4),
    "slow": (LossLaw(L0=1.2, A=0.9, alpha=0.5, B=60, C=0.5, beta=0.6, gamma=0.4), 3e-3),
}


def literally(law: LossLaw, rates: list[float], warmup_sum: float) -> list[float]:
    """The formula as it is written, two loops deep."""
    losses = []
    for t in range(len(rates)):
        loss = law.L0 + law.A * (sum(rates[: t + 1]) + warmup_sum) ** -law.alpha
        for k in range(1, t + 1):
            x = rates[k] ** -law.gamma * sum(rates[k : t + 1])
            loss -= law.B * (rates[k - 1] - rates[k]) * (1 - (law.C * x + 1) ** -law.beta)
        losses.append(loss)
    return losses


def made(
    schedule: Schedule, law: LossLaw, peak: float, steps: int = 1000, noise: float = 0.0, seed: int = 0
) -> LossCurve:
    """A run that follows a law, but for the noise of its batches."""
    warmup = steps // 20
    rates = curve(schedule, steps, warmup, peak)
    losses = law.predict(rates[warmup:], float(rates[:warmup].sum()))
    losses = losses * np.exp(noise * np.random.default_rng(seed).standard_normal(len(losses)))
    return LossCurve(type(schedule).__name__, rates[warmup:], losses, float(rates[:warmup].sum()), warmup)


class TestFormula:
    rates = st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=30)

    @given(rates, st.floats(0, 1), st.sampled_from(sorted(LAWS)))
    def test_equals_two_loops(self, rates: list[float], warmup_sum: float, name: str) -> None:
        law = LAWS[name][0]
        np.testing.assert_allclose(law.predict(np.array(rates), warmup_sum), literally(law, rates, warmup_sum))

    def test_at_chosen_steps_and_in_small_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        law, peak = LAWS["paper"]
        rates = curve(Cosine(), 300, 0, peak)
        whole = law.predict(rates, 0.1)
        at = np.array([0, 1, 7, 150, 299])
        np.testing.assert_allclose(law.predict(rates, 0.1, at=at), whole[at])
        monkeypatch.setattr(loss_law, "CHUNK", 50)
        np.testing.assert_allclose(law.predict(rates, 0.1), whole)
        assert law.final(rates, 0.1) == pytest.approx(whole[-1])

    @pytest.mark.parametrize("jump", [False, True])
    def test_a_long_schedule_is_quick_and_nearly_exact(self, jump: bool) -> None:
        law, peak = LAWS["paper"]
        rates = curve(Cosine(floor=0.0), 20_000, 0, peak)
        if jump:
            rates[8_000:] /= 2
        began = time.process_time()
        losses = law.predict(rates, 0.01)
        assert time.process_time() - began < 1
        at = np.arange(0, 20_000, 173)
        np.testing.assert_allclose(losses[at], law.predict(rates, 0.01, at=at), rtol=2e-5)

    def test_a_rate_of_zero_is_no_infinity(self) -> None:
        law, peak = LAWS["slow"]
        rates = np.concatenate([np.full(50, peak), np.zeros(10), np.full(5, peak)])
        assert np.isfinite(law.predict(rates)).all()

    def test_rounding_is_no_change_of_the_rate(self) -> None:
        law, peak = LAWS["slow"]
        rates = np.full(100, peak) * (1 + 1e-13 * np.random.default_rng(0).standard_normal(100))
        np.testing.assert_allclose(law.predict(rates), law.predict(np.full(100, peak)))

    @pytest.mark.parametrize("rates", [[], [0.0, 1.0], [1.0, -1.0], [1.0, np.nan], [[1.0]]])
    def test_refuses_impossible_rates(self, rates: list[Any]) -> None:
        with pytest.raises(ValueError, match="learning rates must be"):
            LAWS["slow"][0].predict(np.array(rates, dtype=float))

    def test_refuses_impossible_constants(self) -> None:
        with pytest.raises(ValueError, match="alpha must be a finite number from 0 up, found -1"):
            LossLaw(1, 1, -1, 1, 1, 1, 1)


class TestSmooth:
    def test_is_a_centred_mean_that_leaves_nan_out(self) -> None:
        np.testing.assert_allclose(smooth(np.array([1.0, 2, 6, 4, 5]), 3), [1, 3, 4, 5, 5])
        np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 5, 4, 5]), 3), [1, 3, 4.5, 14 / 3, 5])

    @given(st.integers(1, 40), st.integers(2, 60))
    def test_keeps_a_straight_line(self, window: int, steps: int) -> None:
        line = 3 + 0.1 * np.arange(steps)
        np.testing.assert_allclose(smooth(line, window), line)


class TestFit:
    @pytest.mark.parametrize("name", sorted(LAWS))
    @pytest.mark.parametrize("noise", [0.0, 0.03])
    def test_constant_and_cosine_predict_a_decay_never_seen(self, name: str, noise: float) -> None:
        law, peak = LAWS[name]
        fitted = fit([made(Constant(), law, peak, noise=noise, seed=1), made(Cosine(), law, peak, noise=noise, seed=2)])
        assert not fitted.warnings
        assert all(result.r2 > 0.98 for result in fitted.scores)
        for unseen in (WarmupStableDecay(), WarmupStablePowerDecay(decay=0.4), Linear()):
            result = score(fitted.law, made(unseen, law, peak))
            assert abs(result.final_error) < (0.015 if name == "slow" else 0.01)
            assert result.r2 > 0.98

    def test_two_runs_of_two_thousand_steps_are_quick_and_always_the_same(self) -> None:
        law, peak = LAWS["slow"]
        runs = [made(Constant(), law, peak, 2000, 0.02, 1), made(Cosine(), law, peak, 2000, 0.02, 2)]
        began = time.process_time()
        fitted = fit(runs)
        assert time.process_time() - began < 15
        assert fit(runs).law == fitted.law

    def test_outliers_and_missing_losses_do_little(self) -> None:
        law, peak = LAWS["paper"]
        runs = [made(Constant(), law, peak, noise=0.01, seed=1), made(Cosine(), law, peak, noise=0.01, seed=2)]
        runs[0].losses[300:310] *= 2
        runs[1].losses[100:105] = np.nan
        assert abs(score(fit(runs).law, made(WarmupStableDecay(), law, peak)).final_error) < 0.01

    def test_units_of_the_learning_rate_do_not_matter(self) -> None:
        law, peak = LAWS["paper"]
        runs = [made(Constant(), law, peak, 400), made(Cosine(), law, peak, 400)]
        scaled = [LossCurve(run.name, run.rates * 1e3, run.losses, run.warmup_sum * 1e3, run.warmup) for run in runs]
        here = fit(runs).law.predict(runs[1].rates, runs[1].warmup_sum)
        there = fit(scaled).law.predict(scaled[1].rates, scaled[1].warmup_sum)
        np.testing.assert_allclose(here, there, rtol=1e-4)

    def test_warns_when_no_run_decays(self) -> None:
        law, peak = LAWS["slow"]
        fitted = fit([made(Constant(), law, peak, 400), made(Constant(), law, peak, 300)])
        assert "no run changes its learning rate" in fitted.warnings[0]
        assert fitted.law.B == 0

    def test_warns_when_runs_are_alike(self) -> None:
        law, peak = LAWS["slow"]
        fitted = fit([made(Cosine(), law, peak, 400), made(Cosine(0.12), law, peak, 400, 0.01)])
        assert "nearly the same" in fitted.warnings[0]
        shallow = fit([made(Constant(), law, peak, 400), made(Linear(0.8), law, peak, 400)])
        assert "no run's learning rate falls by a third" in shallow.warnings[0]

    def test_warns_when_the_curve_is_not_of_this_kind(self) -> None:
        law, peak = LAWS["slow"]
        runs = [made(Constant(), law, peak, 400), made(Cosine(), law, peak, 400)]
        runs[0].losses[:] = 3 + np.sin(np.arange(len(runs[0].losses)) / 30)
        assert any("explains only" in warning for warning in fit(runs).warnings)

    def test_warns_when_the_loss_shows_no_floor(self) -> None:
        """As when a model is still learning its first lessons in most of the run."""
        law, peak = LossLaw(L0=0.0, A=2.0, alpha=0.1, B=30, C=0.5, beta=0.6, gamma=0.4), 3e-3
        fitted = fit([made(Constant(), law, peak, 400), made(Cosine(), law, peak, 400)])
        assert any("no sign of levelling off" in warning for warning in fitted.warnings)

    def test_refuses_one_run_and_runs_of_two_models(self) -> None:
        law, peak = LAWS["slow"]
        run = made(Constant(), law, peak, 400)
        with pytest.raises(UserError, match="1 given; a law needs two or more runs"):
            fit([run])
        one, two = ({"model": {"hidden": size, "layers": 2}} for size in (64, 128))
        runs = [LossCurve(name, run.rates, run.losses, recipe=recipe) for name, recipe in (("a", one), ("b", two))]
        with pytest.raises(UserError, match="b: not the model of a: its hidden is 128, not 64"):
            fit(runs)
        with pytest.raises(UserError, match="--window: must be from 1 to a quarter"):
            fit([run, run], window=300)


class TestOptimize:
    @pytest.mark.parametrize("name", sorted(LAWS))
    def test_beats_the_usual_schedules_and_only_falls(self, name: str) -> None:
        law, peak = LAWS[name]
        best = optimize(law, 3000, peak, warmup=100)
        after = best.rates[100:]
        assert len(best.rates) == 3000
        assert best.rates.max() == after[0] == peak
        assert after.min() >= 0
        assert (np.diff(after) <= 0).all()
        assert best.final == pytest.approx(law.predict(after, float(best.rates[:100].sum()))[-1])
        assert all(gain > 1e-4 for gain in best.gains.values()), best.gains
        assert best.baselines["cosine"] == pytest.approx(
            law.final(curve(Cosine(), 3000, 100, peak)[100:], best.rates[:100].sum())
        )

    def test_is_a_plateau_and_a_decay(self) -> None:
        """The shape that the paper finds."""
        law, peak = LAWS["paper"]
        shares = optimize(law, 20_000, peak).rates / peak
        assert (shares[:10_000] > 0.999).all()
        assert shares[-1] < 0.1

    @settings(max_examples=25)
    @given(st.integers(1, 70), st.sampled_from(sorted(LAWS)), st.sampled_from([0.0, 0.1, 1.0]))
    def test_any_length_and_floor(self, steps: int, name: str, floor: float) -> None:
        law, peak = LAWS[name]
        best = optimize(law, steps, peak, floor=floor)
        assert len(best.rates) == steps
        assert best.rates.min() >= floor * peak * (1 - 1e-12)
        assert (np.diff(best.rates) <= 0).all()
        assert best.final <= best.baselines["constant"] + 1e-12

    def test_the_slope_is_that_of_the_formula(self) -> None:
        law, peak = LAWS["paper"]
        rates = curve(Cosine(), 40, 0, peak)
        final, slope = final_and_slope(law, rates, 0.001)
        assert final == pytest.approx(law.final(rates, 0.001), rel=1e-12)
        for step in range(40):
            nudge = np.zeros(40)
            nudge[step] = 1e-4 * peak
            ends = [law.final(rates + sign * nudge, 0.001) for sign in (1, -1)]
            assert slope[step] == pytest.approx((ends[0] - ends[1]) / (2e-4 * peak), rel=1e-4, abs=1e-4)

    def test_the_file_is_a_schedule(self, tmp_path: Path) -> None:
        law, peak = LAWS["slow"]
        best = optimize(law, 500, peak, warmup=20)
        best.save(tmp_path / "deep" / "schedule.json")
        again = curve(FromFile(str(tmp_path / "deep" / "schedule.json")), 500, 20, peak)
        np.testing.assert_allclose(again, best.rates, rtol=1e-8)

    def test_refuses_bad_wishes(self) -> None:
        law, peak = LAWS["slow"]
        for wish, problem in (
            ({"steps": 10, "peak": 0.0}, "peak must be above 0"),
            ({"steps": 10, "peak": peak, "floor": 2.0}, "floor must be from 0 to 1"),
            ({"steps": 10, "peak": peak, "warmup": 10}, "warm-up must be shorter"),
        ):
            with pytest.raises(ValueError, match=problem):
                optimize(law, **wish)  # type: ignore[arg-type]


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a run's directory as the trainer does."""

    def write_run(name: str, rates: Array, losses: Array, first: int = 0, tail: str = "", lineage: Any = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            json.dumps({"step": first + step, "loss": float(loss), "lr": float(rate), "tokens": 1})
            for step, (rate, loss) in enumerate(zip(rates, losses))
        ]
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n" + tail)
        if lineage is not None:
            (folder / "moesaic.json").write_text(json.dumps({"format": 1, "life": lineage}))
        return folder

    return write_run


@pytest.fixture
def followed(write: Write) -> Callable[..., Path]:
    """Write a run that follows the law `slow`."""

    def follow(name: str, schedule: Schedule, steps: int = 400, noise: float = 0.01, **more: Any) -> Path:
        law, peak = LAWS["slow"]
        run = made(schedule, law, peak, steps, noise, seed=len(name))
        rates = curve(schedule, steps, run.warmup, peak)
        return write(name, rates, np.concatenate([np.linspace(8, 6, run.warmup), run.losses]), **more)

    return follow


class TestReadRun:
    rates = curve(Cosine(), 100, 10, 1e-3)
    losses = 3 - 0.01 * np.arange(100)

    @pytest.mark.parametrize("first", [0, 1])
    def test_finds_the_warmup(self, write: Write, first: int) -> None:
        folder = write("a", self.rates, self.losses, first)
        run = read_run(folder)
        assert run.warmup == 10
        assert run.warmup_sum == pytest.approx(self.rates[:10].sum())
        np.testing.assert_allclose(run.rates, self.rates[10:])
        np.testing.assert_allclose(run.losses, self.losses[10:])
        np.testing.assert_array_equal(read_run(folder / "metrics.jsonl").losses, run.losses)

    @given(st.integers(0, 50), st.integers(2, 60), st.sampled_from([Constant(), Linear(), WarmupStableDecay()]))
    def test_the_warmup_is_what_the_trainer_made_it(self, warmup: int, after: int, schedule: Schedule) -> None:
        assert warmup_steps(curve(schedule, warmup + after, warmup, 3e-4)) == warmup

    def test_the_last_of_equal_steps_counts_and_a_torn_line_is_left_out(self, write: Write) -> None:
        again = json.dumps({"step": 99, "loss": 7.0, "lr": 1e-4}) + "\n"
        run = read_run(write("a", self.rates, self.losses, tail=again + '{"step": 100, "lo'))
        assert len(run.losses) == 90
        assert run.losses[-1] == 7.0

    def test_steps_that_were_not_logged_are_filled_in(self, write: Write) -> None:
        folder = write("a", curve(Linear(), 1000, 0, 1e-3), np.linspace(4, 3, 1000))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join(lines[::10]) + "\n")
        run = read_run(folder)
        assert len(run.rates) == 991
        assert np.isfinite(run.losses).sum() == 100
        np.testing.assert_allclose(run.rates, curve(Linear(), 1000, 0, 1e-3)[:991])

    def test_losses_on_held_out_text(self, write: Write) -> None:
        """Measured now and then, exact, beside batches that are nothing but noise: a law is fitted to them alone."""
        law, peak = LAWS["paper"]
        folders, noise = [], np.random.default_rng(0)
        for name, schedule in (("a", Constant()), ("b", Cosine()), ("c", WarmupStableDecay(floor=0.1))):
            run = made(schedule, law, peak, 1000)
            rates = curve(schedule, 1000, run.warmup, peak)
            folder = write(name, rates, 3 + noise.random(1000))
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for line, loss in list(zip(lines[run.warmup :], run.losses))[9::10]:
                line["loss/held_out"] = loss
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
            folders.append(folder)
        constant, cosine, wsd = (read_run(folder, "loss/held_out") for folder in folders)
        assert np.isfinite(constant.losses).sum() == 95 and constant.window == 1
        fitted = fit([constant, cosine])
        assert fitted.key == "loss/held_out" and min(one.r2 for one in fitted.scores) > 0.9999
        told = score(fitted.law, wsd)
        assert told.r2 > 0.999 and abs(told.final_error) < 5e-3 and told.final == wsd.losses[-1]
        fitted.save(folders[0] / "law.json")
        # The law's file says which loss it tells.
        assert main(["law", "predict", str(folders[0] / "law.json"), "--run", str(folders[2])]) == 0
        assert load_law(folders[0] / "law.json")[1]["loss"] == "loss/held_out"

    def test_one_spoilt_loss_is_left_out(self, write: Write) -> None:
        losses = np.linspace(4, 3, 400)
        losses[200] = np.nan
        assert np.isnan(read_run(write("a", np.full(400, 1e-3), losses)).losses).sum() == 1

    @pytest.mark.parametrize(
        ("losses", "rates", "first", "problem"),
        [
            (np.full(20, 3.0), np.full(20, 1e-3), 0, "has 20 steps after warm-up, too few"),
            (np.full(100, np.nan), np.full(100, 1e-3), 0, "100.0% of its losses are missing or not finite"),
            (np.full(100, -1.0), np.full(100, 1e-3), 0, "losses of zero or below"),
            (np.full(100, 3.0), np.full(100, np.nan), 0, "metrics.jsonl:1: lr is NaN"),
            (np.full(100, 3.0), np.zeros(100), 0, "its learning rate is zero at the start"),
            (np.full(100, 3.0), np.full(100, 1e-3), 500, "begins at step 500"),
        ],
    )
    def test_refuses_what_is_no_curve(
        self, write: Write, losses: Array, rates: Array, first: int, problem: str
    ) -> None:
        with pytest.raises(UserError, match=problem):
            read_run(write("a", rates, losses, first))

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("", "holds no step"),
            ("nonsense\n{}\n", ":1: is not a JSON object"),
            ('{"step": 0, "loss": 1.0}\n{}\n', ":1: has no 'lr'"),
            ('{"step": "a", "loss": 1.0, "lr": 1.0}\n', ':1: step is "a"'),
        ],
    )
    def test_refuses_broken_files(self, tmp_path: Path, text: str, problem: str) -> None:
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(UserError, match=problem):
            read_run(tmp_path)

    def test_says_that_there_is_no_run(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="metrics.jsonl: no such file. Give a run's directory"):
            read_run(tmp_path)
        (tmp_path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
        with pytest.raises(UserError, match="not a text file"):
            read_run(tmp_path)


@pytest.mark.figures
class TestCommands:
    def test_from_runs_to_a_schedule(
        self, followed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs = [str(followed("constant", Constant())), str(followed("cosine", Cosine()))]
        unseen = str(followed("wsd", WarmupStableDecay()))
        law, schedule, picture = (str(tmp_path / name) for name in ("law.json", "schedule.json", "curve.png"))

        assert main(["law", "fit", *runs, "--out", law, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert [result["steps"] for result in report["scores"]] == [400, 400]
        assert load_law(law)[0].L0 == pytest.approx(report["law"]["L0"])

        assert main(["law", "predict", law, "--run", unseen, "--png", picture, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["score"]["r2"] > 0.98
        assert abs(report["score"]["final_error"]) < 0.01
        assert Path(picture).read_bytes().startswith(b"\x89PNG")

        assert main(["law", "predict", law, "--run", unseen, "--schedule", "wsd", "decay=0.2", "--json"]) == 0
        named = json.loads(capsys.readouterr().out)
        assert named["final"] == pytest.approx(report["final"], rel=1e-6)
        assert named["warmup"] == report["warmup"] == 20

        assert main(["law", "optimize", law, "--steps", "400", "--out", schedule, "--png", picture, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["gains"]["cosine"] > 0
        assert report["warmup"] == 20

        command = ["law", "predict", law, "--schedule", "from_file", f"path={schedule}", "--steps", "400"]
        assert main([*command, "--out", str(tmp_path / "curve.json"), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["final"] == pytest.approx(report["final"], rel=1e-6)
        content = json.loads((tmp_path / "curve.json").read_text())
        assert content["step"][0] == 20
        assert len(content["step"]) == len(content["loss"]) == len(content["lr"]) == 380

    def test_a_long_warm_up_is_that_of_the_runs(
        self, followed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        runs = [str(followed("constant", Constant())), str(followed("cosine", Cosine()))]
        law, schedule = tmp_path / "law.json", str(tmp_path / "schedule.json")
        assert main(["law", "fit", *runs, "--out", str(law)]) == 0
        law.write_text(json.dumps(json.loads(law.read_text()) | {"warmup": 60}))
        for steps, warmup in ((400, 60), (1000, 60), (200, 20)):  # a shorter run has a tenth at most
            assert main(["law", "optimize", str(law), "--steps", str(steps), "--out", schedule]) == 0
            assert f"train.steps={steps} train.warmup_steps={warmup} " in capsys.readouterr().out
            assert len(json.loads(Path(schedule).read_text())["factors"]) == steps - warmup

    def test_in_words(self, followed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        runs = [str(followed("constant", Constant())), str(followed("cosine", Cosine()))]
        law, schedule, plot = str(tmp_path / "my law.json"), str(tmp_path / "schedule.json"), str(tmp_path / "p.png")
        assert main(["law", "fit", *runs, "--out", law, "--window", "11"]) == 0
        out = capsys.readouterr().out
        assert "losses are means of 11 steps" in out
        for line in out.splitlines()[-2:]:  # what it says to do next can be done
            command = line[line.index("moesaic ") :].replace("FILE", schedule).replace(" N", " 400")
            assert main(shlex.split(command)[1:]) == 0
        capsys.readouterr()
        assert main(["law", "predict", law, "--schedule", "linear", "--steps", "4000", "--peak", "0.1"]) == 0
        out = capsys.readouterr().out
        assert "linear: predicted final loss" in out
        assert "fitted at a peak of 0.003; 0.1 is an extrapolation" in out
        assert "fitted on runs of up to 400 steps; 4,000 is an extrapolation" in out
        assert main(["law", "predict", law, "--schedule", "linear", "--run", runs[1], "--png", plot]) == 0
        assert "trained with other learning rates than these" in capsys.readouterr().out
        assert main(["law", "optimize", law, "--steps", "300", "--out", schedule]) == 0
        assert "schedule={name: from_file, path: " in capsys.readouterr().out

    def test_an_example_of_each_is_in_the_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["law", "--help"]) == 0
        text = capsys.readouterr().out
        assert all(f"moesaic law {name} " in text for name in ("fit", "predict", "optimize"))

    def fails(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert main(["law", *arguments]) == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert err.count("\n") <= 2
        return " ".join(err.split())

    def test_wrong_requests(
        self, followed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        one = str(followed("one", Constant()))
        law = str(tmp_path / "law.json")
        lines = {
            ("fit", one, "--out", law): "a law needs two or more runs",
            ("fit", one, one, "--out", law): "given twice",
            ("fit", one, str(tmp_path / "none"), "--out", law): "none: no such file",
            ("predict", law, "--schedule", "wsd"): "law.json: no such file. Write one with moesaic law fit",
        }
        for arguments, problem in lines.items():
            assert problem in self.fails(capsys, *arguments)
        assert not Path(law).exists()

        LAWS["slow"][0].save(law)
        lines = {
            ("predict", law): "--schedule: missing",
            ("predict", law, "--schedule", "wds", "--steps", "9"): 'no such method "wds"; did you mean wsd?',
            ("predict", law, "--schedule", "wsd"): "--steps: missing",
            ("predict", law, "--schedule", "wsd", "--steps", "9"): "--peak: missing",
            ("predict", law, "--schedule", "wsd", "decay", "--steps", "9"): '"decay" is not of the form key=value',
            ("predict", law, "--schedule", "wsd", "decay=7", "--steps", "9"): "decay must be above 0",
            ("predict", law, "--schedule", "wsd", "decy=1", "--steps", "9"): "decy: no such option of wsd",
            ("predict", law, "--schedule", "wsd", "--steps", "9", "--peak", "-1"): "--peak: must be a number above 0",
            ("predict", law, "--run", one, "--steps", "9"): "--steps: goes with --schedule",
            ("predict", law, "--run", one, "--schedule", "wsd", "--steps", "99"): "380 steps after warm-up",
            (
                "optimize",
                law,
                "--steps",
                "9",
                "--peak",
                "1",
                "--warmup",
                "9",
                "--out",
                law,
            ): "--warmup: must be below the number of",
        }
        for arguments, problem in lines.items():
            assert problem in self.fails(capsys, *arguments), arguments

        for content, problem in (
            ("[]", "holds a list, not a JSON object. Write one with moesaic law fit"),
            ("{", "not JSON"),
            ('{"law": {"A": 1}}', "must have L0, A"),
        ):
            Path(law).write_text(content)
            assert problem in self.fails(capsys, "predict", law, "--run", one)

    def test_runs_of_two_models(
        self, followed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        life = [[{"stage": "train", "recipe": {"model": {"hidden": size}}}] for size in (64, 128)]
        runs = [
            str(followed("constant", Constant(), lineage=life[0])),
            str(followed("cosine", Cosine(), lineage=life[1])),
        ]
        assert "its hidden is 128, not 64" in self.fails(capsys, "fit", *runs, "--out", str(tmp_path / "law.json"))


@pytest.mark.parametrize(
    "words", [["predict", "law.json", "--schedule", "wsd"], ["optimize", "law.json", "--out", "a"]]
)
def test_a_curve_that_would_never_end_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["law", *words, "--steps", "1000000000"]) == 2
    assert "less than or equal to 10000000" in capsys.readouterr().err
