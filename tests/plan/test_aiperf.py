"""The score: what it counts, what it predicts, and that it can be taken."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.plan import aiperf
from moesaic.plan.aiperf import LARGE, SMALL, Score, Task, predict_score, score_here, search_space, summary, task_for
from moesaic.plan.calibrate import Trial
from moesaic.plan.hardware import load_cluster, load_device

TINY = Task(width=32, batch=64, epochs=3, dtype="fp32", samples=1024)


def test_operations_are_counted_as_aiperf_does() -> None:
    """Two per weight and sample forward, four backward; validation forward only, on a quarter of the samples."""
    task = Task(width=4, batch=8, epochs=2, dtype="fp32", samples=100, inputs=3, classes=5)
    weights = 3 * 4 + 4 * 4 + 4 * 5
    assert task.layers(Trial(4, 2)) == [(3, 4), (4, 4), (4, 5)]
    assert task.operations(Trial(4, 2)) == 2 * (6 * weights * 100 + 2 * weights * 25)


def test_the_score_is_operations_per_second_times_minus_log_error() -> None:
    results = [(0.3, 2.0, Trial(32, 2)), (0.2, 4.0, Trial(64, 2))]
    found = summary(TINY, results)
    operations = TINY.operations(Trial(32, 2)) + TINY.operations(Trial(64, 2))
    assert found.operations_per_second == pytest.approx(operations / 6)
    assert found.score == pytest.approx(operations / 6 * -math.log(0.2))
    assert (found.error, found.trials, found.seconds) == (0.2, 2, 6.0)
    assert summary(TINY, [(0.0, 1.0, Trial(32, 2))]).error == 1 / 256  # not infinite
    with pytest.raises(UserError, match="90%"):
        summary(TINY, [(0.9, 1.0, Trial(32, 2))])


def test_a_better_error_scores_higher_at_the_same_speed() -> None:
    scores = [Score(1e9, error, 1.0, 1, 3).score for error in (0.3, 0.2, 0.1)]
    assert scores == sorted(scores)
    assert str(Score(2e12, math.exp(-1), 1.0, 1, 3)).startswith("2.0 TOPS regulated")


def test_the_search_grows_from_the_best() -> None:
    assert search_space(TINY) == [Trial(32, 2)]
    assert search_space(TINY, Trial(32, 2)) == [Trial(64, 2), Trial(32, 3)]


def test_predictions_grow_with_devices_and_with_speed() -> None:
    one, many = predict_score(load_cluster("1xH200")), predict_score(load_cluster("64xH200"))
    assert many.score == pytest.approx(64 * one.score)
    assert predict_score(load_cluster("1xA100")).score < one.score < predict_score(load_cluster("1xB200")).score
    assert one.operations_per_second < load_device("h200").sustained("bf16")  # never more than large matmuls reach
    assert task_for(load_device("cpu")) == SMALL and task_for(load_device("h200")) == LARGE
    with pytest.raises(UserError, match="between 0 and 1"):
        predict_score(load_cluster("1xH200"), error=1.0)


def test_a_machine_can_be_scored() -> None:
    """A task small enough for a test; it must learn, or the number means nothing."""
    found = score_here("cpu", replace(TINY, epochs=12, samples=2048))
    assert found.trials == 3 and found.seconds > 0
    assert 0 < found.error <= aiperf.MOST_ERROR and found.score > 0


def test_the_doctor_tells_it_only_when_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moesaic import doctor

    monkeypatch.setattr(doctor, "examine", lambda: iter([doctor.Finding("torch", "here")]))
    monkeypatch.setattr(aiperf, "score_here", lambda: Score(3e9, math.exp(-2), 1.0, 1, 3))
    assert main(["doctor", "--json"]) == 0
    assert [finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]] == ["torch"]
    assert main(["doctor", "--score", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["findings"][-1]
    assert told["name"] == "score" and told["found"].startswith("6.0 GOPS")
