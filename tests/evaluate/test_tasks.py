"""Questions through the engine: the answers `transformers` gives to the same prompts, and how sure a share is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from scipy.stats import binomtest

import moesaic
from moesaic.cli import main
from moesaic.data.tasks import score, tasks
from moesaic.data.tasks.families import PRESETS
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.tasks import Tasks, held_out
from moesaic.serve.core.text import TextStream
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("asked") / "model")


def test_answers_are_those_of_transformers(directory: Path) -> None:
    model = moesaic.load(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    found = Tasks("sums", 4, 12).run(model, SuiteContext())
    assert model.tokenizer is not None
    for sample, task in zip(found["samples"], held_out("sums", 4), strict=True):
        text = model.tokenizer.chat([{"role": "user", "content": task.question.strip()}])
        prompt = torch.tensor([model.tokenizer.encode(text, special=False)])
        with torch.inference_mode():
            out = theirs.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, prompt.shape[1] :]
        stream = TextStream(model.tokenizer, prompt[0].tolist())
        assert sample["answer"] == "".join(stream.push(token) for token in out.tolist()).strip()
        assert sample["question"] == task.question.strip() and sample["expected"] == task.answer
        assert sample["right"] == (score(task, sample["answer"]) >= 1.0)
    assert found["examples"] == 4 and 0 < found["answer_tokens"] <= 12


def test_a_model_that_knows_the_answers_is_right(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer counts, not only those that are shown."""
    asked = held_out("sums", 10)
    known = iter([task.answer if number % 2 else "no idea" for number, task in enumerate(asked)])
    monkeypatch.setattr("moesaic.evaluate.suites.tasks.score", lambda task, answer: score(task, next(known)))
    found = Tasks("sums", 10, 2).run(moesaic.load(directory), SuiteContext())
    assert found["accuracy"] == 0.5 and found["accuracy_low"] < 0.5 < found["accuracy_high"]


def test_each_kind_is_told_by_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.evaluate.suites.tasks.score", lambda task, answer: float(task.family == "gcd"))
    found = Tasks("gcd,lcm:max_value=20", 6, 2).run(moesaic.load(directory), SuiteContext())
    assert found["by_kind"] == {"gcd": 1.0, "lcm": 0.0} and found["accuracy"] == 0.5
    assert "by_kind" not in Tasks("gcd", 2, 2).run(moesaic.load(directory), SuiteContext())


def test_thoughts_are_no_answer() -> None:
    suite = Tasks("gcd", 1)
    (question,) = suite.questions(SuiteContext())
    assert suite.judge(question, f"<think>Perhaps.</think>{question.truth}") == 1
    assert suite.judge(question, f"<think>Perhaps\n{question.truth}") == 0


@pytest.mark.parametrize("family", PRESETS["questions"])
def test_an_answer_that_the_judge_did_not_expect_is_wrong(family: str) -> None:
    task = tasks(family, "test", 0)
    for answer in ("", "1 interior", "[", "['a',", "-", "1e999", "\x00", "no\nidea"):
        assert score(task, answer) < 1
    assert score(task, task.answer) == 1


@pytest.mark.parametrize(("right", "count"), [(0, 10), (3, 10), (10, 10), (64, 128), (1, 1)])
def test_the_interval_is_wilsons(right: int, count: int) -> None:
    theirs = binomtest(right, count).proportion_ci(0.95, "wilson")
    assert wilson(right, count) == pytest.approx((theirs.low, theirs.high), abs=1e-6)


def test_no_rounding_is_left_where_none_or_all_are_right() -> None:
    for count in range(1, 300):
        assert wilson(0, count)[0] == 0.0 and wilson(count, count)[1] == 1.0


def test_the_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", str(directory), "--suite", "tasks", "--json", "family=gcd", "examples=3", "max_tokens=4"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 3
    assert main([*arguments[:-3], "family=gdc"]) == 2
    assert "gcd" in capsys.readouterr().err
