"""The plot of an alignment shows what its metrics hold, and nothing is plotted of nothing."""

from __future__ import annotations

import json

import matplotlib.image
import pytest

from moesaic.align import plot
from moesaic.align.plot import plot_alignment
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.rollout import Sample


def write(directory, lines):
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


@pytest.mark.figures
def test_panels_are_those_whose_metrics_are_there(tmp_path, monkeypatch):
    lines = [{"step": n, "loss": 0.1, "tokens": n, "reward": n / 9, "mismatch_max": 0.0} for n in range(1, 10)]
    lines[4]["accuracy"] = 0.5
    lines[8]["accuracy"] = 0.9
    titles = []
    monkeypatch.setattr(plot, "label", lambda axes, title, *rest, **options: titles.append(title))
    found = plot_alignment(write(tmp_path / "run", lines))
    assert titles == ["Held-out accuracy, and mean reward", "|Δlogp| between trainer and engine: 0 throughout"]
    assert found == tmp_path / "run" / "alignment.png" and matplotlib.image.imread(found).std() > 0


@pytest.mark.figures
def test_the_time_of_a_step_is_plotted_by_phase(tmp_path, monkeypatch):
    lines = [{"step": n, "tokens": n, "time/generate": 2.0, "time/reward": 0.5, "time/other": 0.1} for n in range(1, 9)]
    monkeypatch.setattr("matplotlib.axes.Axes.stackplot", lambda axes, *given, **said: stacks.append((given, said)))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *given, **said: None)
    stacks = []
    plot_alignment(write(tmp_path / "run", lines))
    ((_, heights), said), *more = stacks
    assert not more and list(said["labels"]) == ["generate", "reward", "other"]
    assert [float(values[-1]) for values in heights] == pytest.approx([2.0, 0.5, 0.1])


def test_a_run_without_any_of_them_has_no_plot(tmp_path):
    directory = write(tmp_path / "run", [{"step": 1, "loss": 0.1, "tokens": 1}])
    assert plot_alignment(directory) is None and not (directory / "alignment.png").exists()


@pytest.mark.parametrize("question", ["1 + 2 =", "words " * 50 + "1 + 2 ="])
def test_a_sample_is_told_in_a_line(question):
    sample = Sample([1], [2], [0.0], [0], "1+2=3\n3", "stop", Judged(1.0, {}), question=question)
    told = sample.line()
    assert told.endswith("1 + 2 = 1+2=3 3 (reward 1)") and "\n" not in told and len(told) < 120
