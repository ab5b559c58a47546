"""lm-eval's own tasks on our model: the numbers its Hugging Face model gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.evaluate.lm_eval_model import LMEvalModel
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.lm_eval import LMEval
from tests.serve.made import talking_model

CHOICE = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("asked") / "model")


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    lines = [
        {"question": f"The number {n} is", "choices": ["a number", "yes", f"{n}", "name or"], "answer": n % 4}
        for n in range(16)
    ]
    data = tmp_path / "data.json"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "own_choice.yaml"
    file.write_text(CHOICE.format(data=data))
    return file


@pytest.fixture(scope="module")
def both(directory: Path) -> tuple[LMEvalModel, HFLM]:
    theirs = HFLM(pretrained=str(directory), tokenizer=str(directory), device="cpu", dtype="float32", batch_size=1)
    return LMEvalModel(moesaic.load(directory)), theirs


def instances(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_log_likelihoods(both: tuple[LMEvalModel, HFLM]) -> None:
    pairs = [("The number 3 is", " a number"), ("", "yes or no"), ("as you ", "like it"), ("{", '"name": "x"')]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True) for model in both)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], rel=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_whole_texts_in_windows(both: tuple[LMEvalModel, HFLM]) -> None:
    texts = [("The number 7 is a number; " * 120,), ("yes",)]  # the first is longer than the context
    ours, theirs = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", *texts), disable_tqdm=True) for model in both
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


def test_a_beginning_token_is_there_once(directory: Path, tmp_path: Path) -> None:
    """As in Llama's tokenizers: every text begins with it, and what the chat template writes has it already."""
    place = tmp_path / "begins"
    shutil.copytree(directory, place)
    words = Tokenizer.from_file(str(place / "tokenizer.json"))
    begin = "<|user|>"
    words.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, words.token_to_id(begin))])
    words.save(str(place / "tokenizer.json"))
    settings = json.loads((place / "tokenizer_config.json").read_text())
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": begin}))
    ours = LMEvalModel(moesaic.load(place))
    theirs = HFLM(pretrained=str(place), tokenizer=str(place), device="cpu", dtype="float32", batch_size=1)
    chat = ours.apply_chat_template([{"role": "user", "content": "The number 3 is"}])
    for text in ("The number 3 is", chat):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        assert ours.tok_encode(text).count(words.token_to_id(begin)) == 1
    pairs = [("", "yes or no"), (chat, "a number")]
    found, known = (
        model.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True) for model in (ours, theirs)
    )
    assert [value for value, _ in found] == pytest.approx([value for value, _ in known], rel=1e-4)


def test_answers_longer_than_the_context_are_refused(both: tuple[LMEvalModel, HFLM]) -> None:
    asked = instances("generate_until", ("The number 3 is", {"until": [], "max_gen_toks": 512}))
    with pytest.raises(UserError, match="answers of 512 tokens"):
        both[0].generate_until(asked)


def test_answers(both: tuple[LMEvalModel, HFLM]) -> None:
    wishes = {"until": ["\n\n\n"], "max_gen_toks": 10, "do_sample": False}
    asked = [(f"The number {n} is", dict(wishes)) for n in range(5)]
    ours, theirs = (model.generate_until(instances("generate_until", *asked), disable_tqdm=True) for model in both)
    # What stands for half a character at the end of an answer is left out here, and written as a mark there.
    strip = str.maketrans("", "", "�")
    assert [one.translate(strip).replace("</think>", "") for one in ours] == [one.translate(strip) for one in theirs]


def test_a_task_file_gives_the_same_numbers(both: tuple[LMEvalModel, HFLM], task: Path) -> None:
    found = LMEval().run(both[0].model, SuiteContext(task))
    told = lm_eval.simple_evaluate(
        model=both[1], tasks=["own_choice"], task_manager=TaskManager(include_path=str(task.parent)), log_samples=False
    )
    assert told is not None
    theirs = told["results"]["own_choice"]
    assert found["own_choice: acc"] == theirs["acc,none"] and found["own_choice: acc_norm"] == theirs["acc_norm,none"]


def test_data_that_is_not_there(directory: Path, task: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (task.parent / "data.json").unlink()
    assert main(["evaluate", str(directory), "--suite", "lm_eval", "--data", str(task)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "own_choice cannot be loaded" in told and "may name local data" in told


def test_mistakes(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(directory), "--suite", "lm_eval", "tasks=no_such_task_at_all"]) == 2
    assert "no_such_task_at_all" in capsys.readouterr().err
    (tmp_path / "task.yaml").write_text("- 1\n")
    assert main(["evaluate", str(directory), "--suite", "lm_eval", "--data", str(tmp_path / "task.yaml")]) == 2
    assert "names no task" in capsys.readouterr().err
