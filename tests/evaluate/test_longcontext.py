"""Questions over long texts: the text answers what is asked, and scores are those of what the engine says."""

from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.evaluate.long_context_tasks import KINDS, SORTS, Question, prompt, question, score
from moesaic.model.directory import load
from moesaic.serve.core.engine import Engine
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("talking") / "model", context=2048)


@pytest.mark.parametrize("kind", KINDS)
def test_questions_are_the_same_each_time_and_fill_their_length(model: Path, kind: str) -> None:
    tokenizer = load(model).tokenizer
    assert tokenizer is not None
    made, tokens = question(kind, 900, tokenizer, 0, 3)
    again, same = question(kind, 900, tokenizer, 0, 3)
    assert made == again and tokens == same == prompt(made, tokenizer)
    assert 800 < len(tokens) <= 900
    assert question(kind, 900, tokenizer, 0, 4)[0] != made and question(kind, 900, tokenizer, 1, 3)[0] != made
    assert len(question(kind, 1800, tokenizer, 0, 3)[1]) > 1600


def test_answers_stand_in_the_text(model: Path) -> None:
    tokenizer = load(model).tokenizer
    assert tokenizer is not None
    for number in range(5):
        one = {kind: question(kind, 1500, tokenizer, 0, number)[0] for kind in KINDS}
        for kind in ("needle", "multikey"):
            told = dict(re.findall(r"The secret number of the ([\w ]+) is (\d+)\.", one[kind].text))
            (name,) = re.findall(r"of the ([\w ]+)\?", one[kind].asked)
            assert one[kind].answers == (told[name],) and len(told) == (1 if kind == "needle" else 6)
        told = dict(re.findall(r"The secret number of the ([\w ]+) is (\d+)\.", one["multiquery"].text))
        names = re.findall(r"of the (\w+ \w+)", one["multiquery"].asked)
        assert one["multiquery"].answers == tuple(told[name] for name in names) and len(told) == 4
        (name,) = re.findall(r"of the ([\w ]+)\?", one["multivalue"].asked)
        said = re.findall(rf"One of the secret numbers of the {name} is (\d+)\.", one["multivalue"].text)
        assert set(said) == set(one["multivalue"].answers) and len(said) == 3
        homes = dict(re.findall(r"(\w+) has had a small house in (\w+) for", one["qa"].text))
        (person,) = re.findall(r"does (\w+) live", one["qa"].asked)
        assert one["qa"].answers == (homes[person],) and len(homes) == 6
        values: dict[str, str] = {}
        for name, other, value in re.findall(r"VAR (\w+) = (?:VAR (\w+)|(\d+))\.", one["tracking"].text):
            values[name] = value or values[other]  # defined before it is used
        (value,) = re.findall(r"value (\d+)", one["tracking"].asked)
        assert {name for name in values if values[name] == value} == set(one["tracking"].answers)
        assert len(values) == 6
        plural = collections.Counter(one["aggregation"].text.split()).most_common(4)
        assert {word for word, _ in plural[:3]} == set(one["aggregation"].answers) and plural[2][1] > plural[3][1]
        *shown, last = one["fewshot"].opening.splitlines()
        labels = dict(line.split(": ") for line in [*one["fewshot"].text.splitlines(), *shown])
        unseen = last.rstrip(":")
        sort = next(sort for sort, words in SORTS.items() if unseen in words.split())
        assert unseen not in labels
        assert {labels[word] for word in SORTS[sort].split() if word in labels} == set(one["fewshot"].answers)


def test_scores() -> None:
    names = Question("tracking", "", "", "", ("ABA", "CDC", "EFE"))
    assert score(names, " ABA, XYX and efe.") == pytest.approx(2 / 3)
    assert score(names, "ABAB CD") == 0
    number = Question("needle", "", "", "", ("1234",))
    assert score(number, " 1234.") == 1 and score(number, " 12345") == 0
    label = Question("fewshot", "", "", "", ("north",), first=True)
    assert score(label, " north\nsouth: north") == 1 and score(label, " south, north") == 0


def test_the_command(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", str(model), "--suite", "longcontext", "length=300,600", "kinds=needle,fewshot", "examples=2"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["examples"] == 8 and set(told["by_kind"]) == {"needle", "fewshot"}
    assert set(told["by_length"]) == {"300", "600"} and told["score_low"] <= told["score"] <= told["score_high"]
    assert told["cache_share"] == pytest.approx(1.0)
    made = load(model)
    assert made.tokenizer is not None
    cases = [
        question(kind, length, made.tokenizer, 0, number)
        for length in (300, 600)
        for kind in ("needle", "fewshot")
        for number in range(2)
    ]
    said = Engine(made).generate([tokens for _, tokens in cases], max_tokens=24, temperature=0.0)
    assert told["score"] == pytest.approx(sum(score(one, got.text) for (one, _), got in zip(cases, said)) / 8)
    assert told["samples"][0]["said"] == said[0].text

    assert main([*words, "--kv-policy", "snapkv", "--kv", "share=0.25", "--kv", "least=16", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert pruned["cache_share"] < 0.35
    assert pruned["cache_bytes_per_token"] < 0.35 * told["cache_bytes_per_token"]
    for wrong in (
        ["--kv-policy", "snapkvs"],
        ["--kv-policy", "snapkv", "--kv", "shr=0.25"],
        ["--kv-policy", "snapkv", "--kv", "share=2.0"],
        ["--kv", "share=0.25"],
        ["length=4000"],
        ["length=12"],
        ["kinds=noodle"],
        ["examples=0"],
    ):
        assert main([*words, *wrong]) == 2
    assert main(["evaluate", str(model), "--suite", "perplexity", "--kv-policy", "snapkv"]) == 2
