"""What repeated data is worth: recovered on the paper's own problem, and read from a user's pilots."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesaic.cli import main
from moesaic.data.reuse import ReuseLaw, load_reuse
from moesaic.errors import UserError
from moesaic.train.law.reuse import FittedReuse, Pilot, fit_reuse

# Linear regression with isotropic inputs, strongly convex: the paper's first case.
D, NOISE, START, SIZES, EPOCHS = 8, 1.0, 8.0, (32, 96, 288), (2, 4, 8, 16)


def once(steps: int) -> np.ndarray:
    """The excess risk of one pass over n samples with the best constant rate, for each n: exact, by the recursion of
    the expected square error under Gaussian inputs."""
    rates = np.geomspace(5e-4, 0.15, 120)
    errors, best = np.full(len(rates), START), [START]
    for _ in range(steps):
        errors = errors * (1 - 2 * rates + rates**2 * (D + 2)) + rates**2 * NOISE * D
        best.append(float(errors.min()))
    return np.array(best)


def several(size: int, sets: int = 600) -> dict[int, float]:
    """The same after each of EPOCHS epochs over `size` samples, without replacement, by simulation."""
    chance = np.random.default_rng(size)
    x_SND, true_SD = chance.standard_normal((sets, size, D)), chance.standard_normal((sets, D))
    true_SD *= START**0.5 / np.linalg.norm(true_SD, axis=1, keepdims=True)
    y_SN = np.einsum("snd,sd->sn", x_SND, true_SD) + NOISE**0.5 * chance.standard_normal((sets, size))
    rates = np.geomspace(2e-3, 0.12, 9)[:, None]
    w_SRD, rows, risks = np.zeros((sets, len(rates), D)), np.arange(sets), {}
    for epoch in range(1, max(EPOCHS) + 1):
        order_SN = chance.random((sets, size)).argsort(1)
        for at in range(size):
            x_SD, y_S = x_SND[rows, order_SN[:, at]], y_SN[rows, order_SN[:, at]]
            off_SR = (w_SRD @ x_SD[:, :, None])[..., 0] - y_S[:, None]
            w_SRD -= rates * off_SR[..., None] * x_SD[:, None]
        if epoch in EPOCHS:
            risks[epoch] = float(((w_SRD - true_SD[:, None]) ** 2).sum(-1).mean(0).min())
    return risks


@pytest.fixture(scope="module")
def measured() -> tuple[list[Pilot], dict[tuple[int, int], float]]:
    """Pilots, and E(K, N): how many fresh samples one pass needs for the same risk, over N."""
    fresh, pilots, worth = once(4000), [], {}
    pilots += [Pilot("", size, 1.0, float(fresh[size])) for size in (*SIZES, 600, 1200)]
    for size in SIZES:
        for epochs, risk in several(size).items():
            pilots.append(Pilot("", size, float(epochs), risk))
            worth[size, epochs] = float(np.interp(-risk, -fresh, np.arange(len(fresh)))) / size
    return pilots, worth


@pytest.fixture(scope="module")
def fitted(measured: tuple[list[Pilot], dict[tuple[int, int], float]]) -> FittedReuse:
    return fit_reuse(measured[0])


class TestLinearRegression:
    def test_the_problem_is_the_papers(self, measured: tuple[list[Pilot], dict[tuple[int, int], float]]) -> None:
        worth = measured[1]
        assert all(worth[size, 16] - worth[size, 8] < 0.3 for size in SIZES)  # a plateau
        assert worth[288, 16] > worth[32, 16] + 0.3  # that grows with N

    def test_the_fit_recovers_the_effective_reuse(
        self, fitted: FittedReuse, measured: tuple[list[Pilot], dict[tuple[int, int], float]]
    ) -> None:
        off = [fitted.law.effective(epochs, size) / worth - 1 for (size, epochs), worth in measured[1].items()]
        assert np.sqrt(np.mean(np.square(off))) < 0.12 and max(map(abs, off)) < 0.3
        assert fitted.law.plateau(288) > fitted.law.plateau(32) + 0.1

    def test_simpler_laws_do_not(self, fitted: FittedReuse) -> None:
        assert fitted.others["E = K"] > 2 * fitted.error and fitted.others["borrowed"] > 2 * fitted.error
        assert fitted.others["E without N"] > 1.05 * fitted.error

    def test_what_is_left_out_is_predicted(self, measured: tuple[list[Pilot], dict[tuple[int, int], float]]) -> None:
        pilots, _ = measured
        largest = [pilot for pilot in pilots if pilot.tokens == 288 and pilot.epochs > 1]
        from_smaller = fit_reuse([pilot for pilot in pilots if pilot not in largest])
        for pilot in largest:
            assert from_smaller.loss(288, pilot.epochs) == pytest.approx(pilot.loss, rel=0.2)


def test_a_planted_law_is_found_whatever_its_form() -> None:
    for law in (ReuseLaw(-8.0, 1.0, "log", "sum"), ReuseLaw(-6.0, 0.5, "power", "exponential")):
        pilots = [
            Pilot("", tokens, epochs, 1.5 + 60 * (tokens * law.effective(epochs, tokens)) ** -0.4)
            for tokens in (20_000, 80_000, 320_000)
            for epochs in (1, 2, 4, 8, 16)
        ]
        fitted = fit_reuse([*pilots, Pilot("", 2_000_000, 1.0, 1.5 + 60 * 2_000_000**-0.4)])
        for tokens in (20_000, 320_000):
            assert fitted.law.plateau(tokens) == pytest.approx(law.plateau(tokens), rel=0.1)
            assert fitted.law.useful(tokens) == pytest.approx(law.useful(tokens), rel=0.1)
        assert not fitted.warnings


def test_too_few_pilots() -> None:
    one = [Pilot("", tokens, 1.0, 3.0) for tokens in (1, 2, 3, 4, 5, 6)]
    with pytest.raises(UserError, match="0 of the pilots' sizes were repeated"):
        fit_reuse(one)
    with pytest.raises(UserError, match="five constants"):
        fit_reuse(one[:3])


RECIPE = """
model: {vocab: 300, hidden: 16, layers: 2, heads: 2, kv_heads: 1, head_size: 8, dense_hidden: 16, experts: 2,
        experts_per_token: 1, expert_hidden: 8, context: 32}
data: {sources: [{name: sums, path: "builtin:sums", documents: 400}], sequence_length: 32, tokenizer_sample: 50000,
       held_out: 0.1}
train: {batch_tokens: 128, evaluate_every: 100, evaluate_tokens: 1000}
optimizer: {name: adamw, lr: 0.01}
"""


def test_pilots_are_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, data, out = tmp_path / "recipe.yaml", tmp_path / "data", tmp_path / "reuse.json"
    recipe.write_text(RECIPE)
    assert main(["prepare", str(recipe), "--out", str(data)]) == 0
    runs = []
    for tokens, steps in ((1024, 8), (1024, 16), (1024, 32), (2048, 16), (2048, 32), (4096, 32)):
        runs.append(str(tmp_path / f"{tokens}-{steps}"))
        given = [f"data.unique_tokens={tokens}", f"train.steps={steps}", f"train.data={data}"]
        assert main(["train", str(recipe), "--out", runs[-1], *given]) == 0
    capsys.readouterr()
    assert main(["law", "reuse", *runs, "--out", str(out), "--tokens", "4096", "--epochs", "3", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [pilot["epochs"] for pilot in told["pilots"]] == pytest.approx([1, 2, 4, 1, 2, 1], abs=0.15)
    assert told["plans"][0]["epochs"] == 3 and 1 <= told["plans"][0]["effective_epochs"] <= 3
    assert load_reuse(out) == ReuseLaw(**told["law"])
    assert main(["law", "reuse", *runs]) == 0
    assert "epochs worth" in capsys.readouterr().out
    again = [f"train.data={data}", "train.steps=8", f"data.reuse={out}"]
    assert main(["train", str(recipe), "--out", str(tmp_path / "again"), *again]) == 0
    assert main(["train", str(recipe), "--out", str(tmp_path / "no"), f"data.reuse={recipe}"]) == 2
