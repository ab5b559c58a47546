"""LongBench through lm-eval's own tasks, on a few lines in its own format: scores that an oracle gets, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.evaluate.lm_eval_model import LMEvalModel
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.longbench import KINDS, LongBench
from tests.serve.made import talking_model

# One task of every kind, with an answer that is right and what it is asked about.
LINES = {
    "hotpotqa": {"input": "Who wrote it?", "context": "Passage 1: Ada Byron wrote it.", "answers": ["Ada Byron"]},
    "gov_report": {"input": "", "context": "The bridge was built and then closed.", "answers": ["a bridge was closed"]},
    "trec": {
        "input": "Question: Who?\nType:",
        "context": "Question: Where?\nType: Place",
        "answers": ["Person"],
        "all_classes": ["Place", "Person"],
    },
    "lcc": {"input": "", "context": "def add(a, b):\n", "answers": ["    return a + b"]},
    "dureader": {"input": "谁写的？", "context": "文章一：这本书是王明写的。", "answers": ["这本书是王明写的"]},
    "passage_count": {"input": "", "context": "Paragraph 1: a\n\nParagraph 2: b", "answers": ["2"]},
    "qasper": {"input": "What is used?", "context": "We use a graph.", "answers": ["a graph", "graph"]},
}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "data"
    folder.mkdir()
    for name, line in LINES.items():
        extra = {"length": 10, "dataset": name, "language": "en", "all_classes": None, "_id": "0"}
        (folder / f"{name}.jsonl").write_text(json.dumps(extra | line, ensure_ascii=False) + "\n")
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("long") / "model", context=4096)


def test_every_kind_is_scored(directory: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moesaic.load(directory)
    suite = LongBench(",".join(LINES))
    suite.check(data)
    prompts: list[str] = []

    def knows(_: LMEvalModel, requests: list, disable_tqdm: bool = False) -> list[str]:
        prompts.extend(request.args[0] for request in requests)
        return [request.doc["answers"][0] for request in requests]

    monkeypatch.setattr(LMEvalModel, "generate_until", knows)
    found = suite.run(model, SuiteContext(data))
    scores = {key.partition(":")[0]: value for key, value in found.items() if key.endswith(": score")}
    assert scores == {f"local_{name}": pytest.approx(1.0, abs=1e-3) for name in LINES}
    assert any("Who wrote it?" in prompt for prompt in prompts)  # `input` is the task's question
    monkeypatch.setattr(LMEvalModel, "generate_until", lambda _, requests, **__: ["xyzzy" for _ in requests])
    nothing = suite.run(model, SuiteContext(data))
    assert all(value < 0.3 for key, value in nothing.items() if key.endswith(": score"))


def test_the_command(directory: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(directory), "--suite", "longbench", "--data", str(data), "--json"]
    assert main([*words, "tasks=hotpotqa", "limit=1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert 0.0 <= told["local_hotpotqa: qa_f1_score"] <= 1.0


def test_mistakes(data: Path) -> None:
    assert sum(map(len, KINDS.values())) == 21
    for wrong, problem in (
        (lambda: LongBench("nosuch"), "has no nosuch"),
        (lambda: LongBench("hotpotqa").check(None), "folder of LongBench"),
        (lambda: LongBench("hotpotqa").check(data / "hotpotqa.jsonl"), "folder of LongBench"),
        (lambda: LongBench("musique").check(data), "musique.jsonl.*cannot be read.*data.zip"),
    ):
        with pytest.raises((UserError, ValueError), match=problem):
            wrong()
    (data / "trec.jsonl").write_text('{"context": "x", "answers": []}\n')
    with pytest.raises(UserError, match="trec.jsonl:1.*no list of answers"):
        LongBench("trec").check(data)
    (data / "trec.jsonl").write_text("[1]\n")
    with pytest.raises(UserError, match="trec.jsonl:1.*not a line of LongBench"):
        LongBench("trec").check(data)
