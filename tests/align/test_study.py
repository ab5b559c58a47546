"""Studies: every combination is a run that is not run again, and the table is what those runs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.align import study
from moesaic.align.study import Cell, cells_of, of_cell, run_study, summary
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.intervals import across
from moesaic.recipe import Recipe, load_recipe

STAGE = '{name: sft, data: [{path: "builtin:sums"}], steps: 2, batch_tokens: 60, evaluate_every: 0}'
EVALUATED = STAGE.replace("evaluate_every: 0", "evaluate_every: 1, evaluate: 2, max_tokens: 2")
AXES = '{"align.stages.0.lr": [0.001, 0.01], "align.stages.0.steps": [1, 2]}'


def recipe_of(folder: Path, axes: str = AXES, more: str = "seeds: [0, 1], measure: loss", stage: str = STAGE) -> Recipe:
    file = folder / "study.yaml"
    file.write_text(f"align: {{stages: [{stage}]}}\nstudy: {{axes: {axes}, {more}}}\n")
    return load_recipe(file)


def run(recipe: Recipe, base: Path, out: Path) -> study.Study:
    return run_study(recipe, base, out, on_status=lambda status: None, log=lambda text: None)


def test_an_interval_is_students() -> None:
    from scipy.stats import t

    values = [0.2, 0.5, 0.6, 0.9]
    low, high = t.interval(0.95, 3, loc=0.55, scale=0.2886751346 / 2)
    mean, half = across(values)
    assert (mean, half) == pytest.approx((0.55, (high - low) / 2))
    assert str(across([0.5])) == "0.500" and f"{across(values):+}".startswith("+0.550 ± 0.")


def test_gains_are_seed_by_seed_over_the_same_values_of_the_other_axes() -> None:
    # Seeds differ by far more than the values do, and so do the values of the other axis.
    effect = {"a": 0.0, "b": 0.1}
    cells = [Cell({"one": one, "two": two}, seed) for one in "ab" for two in (1, 5) for seed in (0, 1, 2)]
    scores = [effect[cell.values["one"]] + cell.values["two"] + 10.0 * cell.seed for cell in cells]
    found = summary("accuracy", cells, scores)
    first, second, *_ = found.rows
    assert (first.value, first.gain, first.score.mean) == ("a", None, pytest.approx(13.0))
    assert second.gain is not None and second.gain == pytest.approx((0.1, 0.0), abs=1e-9)
    assert second.score.half > 10  # seeds are what a score is uncertain by
    assert found.combined[1].values == {"one": "a", "two": 5} and found.combined[1].score.mean == pytest.approx(15.0)
    assert "+0.100 ± 0.000" in found.text() and "one  two  accuracy" in found.text()


def test_every_combination_is_a_run_of_its_own_that_is_not_run_again(base, tmp_path, monkeypatch) -> None:
    asked, ran = recipe_of(tmp_path), []
    plain = study.align

    def counted(recipe: Recipe, model: Path, out: Path, **options: Any) -> dict[str, Any]:
        ran.append((recipe.align.stages[0].options["lr"], recipe.align.stages[0].options["steps"], out))
        if len(ran) == 4:
            raise KeyboardInterrupt
        return plain(recipe, model, out, **options)

    monkeypatch.setattr(study, "align", counted)
    with pytest.raises(KeyboardInterrupt):
        run(asked, base, tmp_path / "out")
    assert not (tmp_path / "out" / "study.json").exists()
    found = run(asked, base, tmp_path / "out")
    assert len(ran) == 4 + 5 and len({place for *_, place in ran}) == 8  # three were done, and the fourth was begun
    assert [(lr, steps) for lr, steps, _ in ran[4:]] == [(0.001, 2), *[(0.01, 1)] * 2, *[(0.01, 2)] * 2]
    losses = {
        (c["values"]["align.stages.0.lr"], c["values"]["align.stages.0.steps"], c["seed"]): c["score"]
        for c in found.cells
    }
    assert losses[0.001, 1, 0] == losses[0.01, 1, 0] != losses[0.001, 1, 1]  # the first loss is from before any step
    written = json.loads((tmp_path / "out" / "study.json").read_text())
    assert len(written["cells"]) == 8 and written["rows"][1]["gain"]["half"] > 0
    run(asked, base, tmp_path / "out")
    assert len(ran) == 9


def test_the_command(base, tmp_path, capsys) -> None:
    recipe_of(tmp_path, '{model: ["' + str(base) + '"], "align.stages.0.lr": [0.001]}', "seeds: [3], measure: loss")
    words = ["align", str(tmp_path / "study.yaml"), "--model", str(base), "--out", str(tmp_path / "o"), "--study"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["score"]["half"] is None and found["cells"][0]["seed"] == 3


@pytest.mark.parametrize(
    ("measure", "stage", "message"),
    [
        ("los", STAGE, 'no metric "los"; did you mean loss?'),
        ("accuracy", STAGE, "evaluate_every and evaluate must be above 0"),
        ("held_out/slides.content", EVALUATED, "On held-out data it measures accuracy"),
        ("reward", EVALUATED, 'no metric "reward"'),
    ],
)
def test_what_the_last_stage_does_not_measure_is_refused_before_anything_is_run(
    base, tmp_path, measure: str, stage: str, message: str
) -> None:
    asked = recipe_of(tmp_path, more=f"seeds: [0], measure: {measure}", stage=stage)
    with pytest.raises(UserError) as refused:
        run(asked, base, tmp_path / "out")
    assert message in " ".join(str(refused.value).split()) and not (tmp_path / "out").exists()


def test_what_it_does_measure_is_not(base, tmp_path) -> None:
    asked = recipe_of(tmp_path, '{"align.stages.0.lr": [0.001]}', "seeds: [0], measure: accuracy", EVALUATED)
    assert 0 <= run(asked, base, tmp_path / "out").rows[0].score.mean <= 1


def test_what_an_earlier_stage_will_make_is_not_looked_for_before_it_is_run(base, tmp_path) -> None:
    sums = 'data: [{path: "builtin:sums"}], steps: 1'
    judge = f"{{name: reward_model, {sums}, pairs: 8, batch_pairs: 4, evaluate_every: 0}}"
    policy = (
        f'{{name: policy, {sums}, rewards: [{{name: model, path: "stage:1"}}], prompts: 2, group: 2, max_tokens: 2, '
        "evaluate_every: 1, evaluate: 2}"
    )
    asked = recipe_of(tmp_path, '{"align.stages.1.group": [2]}', "seeds: [0], measure: accuracy", f"{judge}, {policy}")
    assert 0 <= run(asked, base, tmp_path / "out").rows[0].score.mean <= 1
    asked = recipe_of(tmp_path, '{"align.stages.1.group": [2]}', "seeds: [0], measure: right", f"{judge}, {policy}")
    with pytest.raises(UserError, match='no metric "right"'):
        run(asked, base, tmp_path / "other")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("{}", "study.axes is empty"),
        ('{"align.stages.0.lr": []}', "study.axes"),
        ('{"align.stages.0.rate": [1]}', "align.stages.0.rate: no such option of sft"),
        ('{"align.stages.3.lr": [1.0]}', "there is no such entry"),
        ('{"align.stages.0.lr": [0.1, fast]}', 'align.stages.0.lr: expected a number, found text "fast"'),
        ("{model: [nowhere]}", "nowhere"),
        ('{"align.stages.0.lr": [0.1, 0.1]}', "names a value twice"),
        ('{"align.stages.0.seed": [0, 1]}', "Name them in study.seeds"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_run(base, tmp_path, axes: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(recipe_of(tmp_path, axes), base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_seed_is_of_every_stage(tmp_path) -> None:
    asked = recipe_of(tmp_path)
    cell = cells_of(asked)[1]
    assert cell.seed == 1 and of_cell(asked, cell).align.stages[0].options["seed"] == 1
    assert of_cell(asked, cell).align.stages[0].options["lr"] == 0.001
