"""Suites of questions: from files, from servers, remembered; their answers are judged as their own rules say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
import torch
import transformers

import moesaic
from moesaic.cli import main
from moesaic.errors import UserError
from moesaic.evaluate.backends import Answer, Backend, CachedBackend, EngineBackend, UrlBackend
from moesaic.evaluate.evaluate import Evaluation
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.evaluate.suites.choice import Choice
from moesaic.evaluate.suites.instructions import Instructions
from moesaic.evaluate.suites.math import Math, final
from moesaic.evaluate.suites.tasks import Tasks
from moesaic.serve.chat_client import ChatClient, plain_text
from tests.serve.api.running import NAME, running
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("asked") / "model")


class Scripted(Backend):
    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def answer(self, conversations, max_tokens, on_answer) -> None:
        for number in reversed(range(len(conversations))):  # the order they come in says nothing
            on_answer(number, Answer(self.texts[number], 3))


def lines(file: Path, *entries: object) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def test_mathematics_is_judged_by_its_meaning(tmp_path: Path) -> None:
    data = lines(
        tmp_path / "math.jsonl",
        {"question": "Half of 1?", "answer": "So it is 1/2.\n#### 1/2"},
        {"problem": "Solve.", "solution": "Thus \\boxed{x^{2}+1}."},
        {"question": "6 times 7?", "answer": 42},
        {"question": "A thousand and one?", "answer": "#### 1,001"},
    )
    said = Scripted("It is \\boxed{\\frac{1}{2}}", "\\boxed{1+x^2}", "I think it is 43", "That makes $1,001.")
    found = Math().run(None, SuiteContext(data, backend=said))
    assert found["accuracy"] == 0.75
    assert [sample["right"] for sample in found["samples"]] == [True, True, False, True]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 5", "5"),
        ("\\boxed{\\frac{1}{2}} and \\boxed{a{b}c}", "a{b}c"),
        ("first 3, then 4.", "4"),
        ("x+1", "x+1"),
        ("between 1,200 and 2,7", "7"),  # no thousands
        ("#### Step 1\nIt is \\boxed{42}.\n#### Check\n6 times 7, and 1 more is 43", "42"),
    ],
)
def test_what_an_answer_comes_to(text: str, answer: str) -> None:
    assert final(text) == answer


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    [
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\boxed{(3, \\frac{\\pi}{2})}", "2"),
        ("5 \\sqrt{2}", "It is \\boxed{5\\sqrt{2}}", "It is 2"),
        ("x \\in [-2, 7]", "\\boxed{[-2, 7]}", "It is 7"),
        ("6 - 5i", "\\boxed{6-5i}", "It is 5"),
        ("18 dollars", "She has $18.", "She has $17."),
        ("So the answer is 42.", "42", "<think>It may be 42"),  # the thought has not ended: nothing was said
    ],
)
def test_a_right_answer_of_several_parts_is_taken_whole(tmp_path: Path, truth: str, right: str, wrong: str) -> None:
    data = lines(tmp_path / "math.jsonl", *[{"problem": "?", "answer": truth}] * 2)
    samples = Math().run(None, SuiteContext(data, backend=Scripted(right, wrong)))["samples"]
    assert [sample["right"] for sample in samples] == [True, False]


def test_an_answer_that_cannot_be_compared_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.evaluate.suites.math.SECONDS", 0.5)
    data = lines(tmp_path / "math.jsonl", *[{"question": "?", "answer": "2"}] * 2)
    said = Scripted("\\boxed{9^{9^{9^9}}}", "\\boxed{2}")
    assert Math().run(None, SuiteContext(data, backend=said))["accuracy"] == 0.5


def test_a_problem_without_an_answer_is_named(tmp_path: Path) -> None:
    data = lines(tmp_path / "math.jsonl", {"question": "?", "answer": "2"}, {"question": "?", "answer": " "})
    with pytest.raises(UserError, match=r"math.jsonl:2: its answer is empty"):
        Math().run(None, SuiteContext(data, backend=Scripted()))


def test_lines_end_where_json_lines_do(tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl"
    text = json.dumps({"question": "a\u2028b\x85c?", "answer": "2"}, ensure_ascii=False)
    file.write_text(f"\ufeff{text}\n", encoding="utf-8")
    (question,) = Math(instruction="").questions(SuiteContext(file))
    assert question.text == "a\u2028b\x85c?"


def test_instructions_are_kept_or_not(tmp_path: Path) -> None:
    rules = [{"kind": "max_words", "value": 3}, {"kind": "min_words", "value": 2}]
    data = lines(tmp_path / "i.jsonl", {"prompt": "a", "constraints": rules}, {"prompt": "b", "constraints": rules})
    said = Scripted("two words", "one")
    assert Instructions().run(None, SuiteContext(data, backend=said))["accuracy"] == 0.5
    assert Instructions(share=True).run(None, SuiteContext(data, backend=said))["accuracy"] == 0.75


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({}, "came without constraints"),
        ({"constraints": "max_words"}, "not a list of objects"),
        ({"constraints": [5]}, "not a list of objects"),
        ({"constraints": [{"kind": "max_wrds", "value": 3}]}, "did you mean max_words?"),
        ({"constraints": [{"kind": "max_words", "value": "x"}]}, "max_words: 'x' is no value for it"),
        ({"constraints": [{"kind": "n_bullets", "value": "x"}]}, "n_bullets: 'x' is no value for it"),
        ({"constraints": [{"kind": "times", "value": {"least": 1}}]}, "is no value for it"),
        ({"constraints": [{"kind": "one_of", "value": "yes, no"}]}, "one_of: 'yes, no' is no value for it"),
        ({"constraints": [{"kind": ["json"]}]}, "no such constraint"),
        ({"constraints": [{"kind": "json", "weight": "x"}]}, "the weight of json is not a number"),
    ],
)
def test_a_line_with_a_wrong_constraint_is_named(tmp_path: Path, line: dict, problem: str) -> None:
    right = {"prompt": "a", "constraints": [{"kind": "json"}]}
    data = lines(tmp_path / "i.jsonl", right, {"prompt": "b"} | line)
    with pytest.raises(UserError) as refused:
        Instructions().run(None, SuiteContext(data, backend=Scripted()))
    assert refused.value.place == f"{data}:2"
    assert problem in refused.value.problem
    assert "A line is such as" in refused.value.remedy


def test_the_likeliest_choice_is_that_of_transformers(directory: Path, tmp_path: Path) -> None:
    """Whichever place it stands at; and where another one is said to be right, none is."""
    entries = []
    for n in range(12):
        choices = ["a number", "yes or no", f"{n}", "name"]
        entries.append({"question": f"The number {n} is", "choices": choices[n % 4 :] + choices[: n % 4]})
    model = moesaic.load(directory)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    assert model.tokenizer is not None
    likeliest = []
    for entry in entries:
        sums = []
        for choice in entry["choices"]:
            before = model.tokenizer.encode(entry["question"])
            tokens = before + model.tokenizer.encode(f" {choice}", special=False)
            with torch.inference_mode():
                logprobs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
            sums.append(sum(float(logprobs[i - 1, tokens[i]]) for i in range(len(before), len(tokens))))
        likeliest.append(sums.index(max(sums)))
    assert len(set(likeliest)) > 2
    for shift, accuracy in ((0, 1.0), (1, 0.0)):
        told = [{**entry, "answer": (best + shift) % 4} for entry, best in zip(entries, likeliest, strict=True)]
        found = Choice().run(model, SuiteContext(lines(tmp_path / f"{shift}.jsonl", *told)))
        assert found["accuracy"] == accuracy


def test_a_server_gives_the_answers_of_its_model(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = moesaic.load(directory, threads=1)
    suite = Tasks("sums", 6, 8)
    alone = suite.run(model, SuiteContext(backend=EngineBackend(model)))
    with running(moesaic.Engine(model, cache_bytes=16 << 20, seed=0)) as server:
        asked = suite.run(None, SuiteContext(backend=UrlBackend(server.url)))
        assert main(["evaluate", server.url, "--model", NAME, "--suite", "tasks", "examples=1", "max_tokens=2"]) == 0
        assert main(["evaluate", server.url, "--model", "other", "--suite", "tasks", "examples=1"]) == 2
    assert asked == alone
    assert "HTTP 404: the model 'other' does not exist" in capsys.readouterr().err


def test_a_server_is_asked_once_what_its_model_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def serve(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "some"}]})
        assert json.loads(request.content)["model"] == "some"
        return httpx.Response(200, json={"choices": [{"message": {"content": "7"}, "finish_reason": "stop"}]})

    opened: list[httpx.AsyncClient] = []

    def client(self: ChatClient) -> httpx.AsyncClient:
        opened.append(httpx.AsyncClient(transport=httpx.MockTransport(serve)))
        return opened[-1]

    monkeypatch.setattr(ChatClient, "open", client)
    backend = UrlBackend("http://there")
    for _ in range(3):
        backend.answer([[{"role": "user", "content": "?"}]], 4, lambda number, said: None)
    assert backend.model_name() == "some"
    assert paths == ["/v1/models", *["/v1/chat/completions"] * 3]
    assert len(opened) == 3


def test_what_was_answered_is_not_asked_again(tmp_path: Path) -> None:
    suite, file = Tasks("sums", 3, 8), tmp_path / "answers.jsonl"
    first = suite.run(None, SuiteContext(backend=CachedBackend(Scripted("1", "2", "3"), file, "model")))
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]) + '{"half')  # killed while writing
    # The last to come is missing.
    again = suite.run(None, SuiteContext(backend=CachedBackend(Scripted("1"), file, "model")))
    assert again == first
    other = suite.run(None, SuiteContext(backend=CachedBackend(Scripted("7", "8", "9"), file, "another")))
    assert [sample["answer"] for sample in other["samples"]] == ["7", "8", "9"]
    file.write_text("[1]\n")
    with pytest.raises(UserError, match="is not an answer"):
        CachedBackend(Scripted(), file, "model")


def test_what_other_weights_answered_in_the_same_place_is_asked_again(directory: Path, tmp_path: Path) -> None:
    place, out = tmp_path / "model", tmp_path / "kept"
    counts = []
    for made in (directory, directory, talking_model(tmp_path / "other", seed=1)):
        shutil.copytree(made, place, dirs_exist_ok=True)
        Evaluation({"tasks": Tasks("sums", 2, 2)}, out=out).run([str(place)], lambda what, done, total: None)
        counts.append(len((out / "answers.jsonl").read_text().splitlines()))
    assert counts == [2, 2, 4]


def test_several_suites_of_one_model_keep_their_numbers(directory: Path, tmp_path: Path, capsys) -> None:
    data = lines(tmp_path / "math.jsonl", {"question": "6 times 7?", "answer": 42})
    asked = ["evaluate", str(directory), "--suite", "tasks,math", "--data", str(data), "examples=1", "max_tokens=2"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["directory"] == str(directory) and list(told["suites"]) == ["tasks", "math"]
    assert all(numbers["examples"] == 1 for numbers in told["suites"].values())


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("seven", "seven"),
        ([{"type": "text", "text": "se"}, {"type": "image_url"}, {"type": "text", "text": "ven"}], "seven"),
        ("half \ud83d", "half ?"),
    ],
)
def test_what_servers_put_into_an_answer(content: object, text: str) -> None:
    assert plain_text(content) == text


def test_models_side_by_side(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "evaluation"
    other = talking_model(tmp_path / "other", seed=1)
    asked = [
        "evaluate",
        str(directory),
        str(other),
        "--suite",
        "tasks",
        "examples=3",
        "max_tokens=4",
        "--out",
        str(out),
    ]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["models"]
    assert list(told) == [str(directory), str(other)] and told[str(other)]["tasks"]["examples"] == 3
    assert json.loads((out / "evaluation.json").read_text())["models"].keys() == told.keys()
    assert len((out / "answers.jsonl").read_text().splitlines()) == 6
    html = (out / "evaluation.html").read_text()
    assert "tasks: accuracy" in html and "http" not in html.partition("</style>")[2]
    assert main(asked) == 0 and "tasks: accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["http://127.0.0.1:9", "--suite", "perplexity"], "looks into the model itself"),
        (["http://127.0.0.1:9", "--suite", "tasks"], "names no model"),
        (["ftp://127.0.0.1/v1", "--suite", "tasks"], "is not the address of a server"),
        (["http://", "--suite", "tasks"], "is not the address of a server"),
        (["http://127.0.0.1:99999", "--suite", "tasks"], "is not the address of a server"),
        (["DIR", "--suite", "tasks", "example=3"], "did you mean examples?"),
        (["DIR", "--suite", "instructions", "--data", "BAD", "examples=-1"], "examples must be at least 0"),
        (["DIR", "--suite", "choice", "--data", "BAD", "examples=-1"], "examples must be at least 0"),
        (["DIR", "--suite", "lm_eval", "limit=-1"], "limit must be at least 0"),
        (["DIR", "--suite", "tasks", "--out", "BAD"], "is a file"),
        (["DIR", "DIR/", "--suite", "tasks"], "is named twice"),
        (["http://127.0.0.1:9", "http://127.0.0.1:9/v1/", "--suite", "tasks"], "is named twice"),
        (["DIR", "--suite", "tasks", "--model", "other"], "--model"),
        (["examples=3", "--suite", "tasks"], "MODEL"),
        (["DIR", "--suite", "math"], "--data"),
        (["DIR", "--suite", "choice", "--data", "BAD"], "is not a JSON object"),
        (["DIR", "--suite", "choice", "--data", "BLANK"], "blank.jsonl:1: the question is empty"),
        (["nowhere", "--suite", "perplexity,math"], "--data: is missing"),
        (["nowhere", "--suite", "choice"], "--data: is missing"),
        (["nowhere", "--suite", "instructions"], "--data: is missing"),
        (["nowhere", "--suite", "tasks,lm_eval"], "Name tasks of lm-eval"),
        (["DIR", "--suite", "tasks,"], "no such method"),
        (["DIR", "--suite", "tasks,agents", "--data", "BAD"], "--data: tasks, agents read no file"),
        (["DIR", "--suite", "tasks", "--api-key-env", "NO_SUCH"], "NO_SUCH"),
        (["DIR", "--suite", "perplexity", "--kv-policy", "sinks"], "pruned"),
    ],
)
def test_mistakes(directory: Path, tmp_path: Path, arguments, problem, capsys) -> None:
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    (tmp_path / "blank.jsonl").write_text('{"question": " ", "choices": ["a b", "c d"], "answer": 0}\n')
    named = {"DIR": str(directory), "DIR/": f"{directory}/", "BAD": str(tmp_path / "bad.jsonl")}
    named["BLANK"] = str(tmp_path / "blank.jsonl")
    assert main(["evaluate", *(named.get(word, word) for word in arguments)]) == 2
    assert problem in capsys.readouterr().err


def test_numbers_are_kept_when_a_later_suite_fails(directory: Path, tmp_path: Path) -> None:
    class Measured(Suite):
        def run(self, model, asked):
            return {"size": 5, "odd": float("nan")}

    class Failing(Suite):
        calls = 0

        def run(self, model, asked):
            self.calls += 1
            if self.calls > 1:
                raise UserError("suite", "failed")
            return {"level": 7}

    other = shutil.copytree(directory, tmp_path / "other")
    evaluation = Evaluation({"measured": Measured(), "failing": Failing()}, out=tmp_path / "out")
    with pytest.raises(UserError, match="failed"):
        evaluation.run([str(directory), str(other)], lambda what, done, total: None)

    def refuse(word: str) -> None:
        raise ValueError(word)

    told = json.loads((tmp_path / "out" / "evaluation.json").read_text(), parse_constant=refuse)["models"]
    assert told[str(directory)] == {"measured": {"size": 5, "odd": None}, "failing": {"level": 7}}
    assert told[str(other)] == {"measured": {"size": 5, "odd": None}}
    assert "failing: level" in (tmp_path / "out" / "evaluation.html").read_text()


def test_a_secret_stays_one(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "very-secret")
    Evaluation({"tasks": Tasks("sums", 1, 2)}, out=tmp_path, api_key_env="A_KEY").run(
        [str(directory)], lambda what, done, total: None
    )
    assert all("very-secret" not in file.read_text() for file in tmp_path.iterdir())
