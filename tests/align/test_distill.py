"""Distillation and rejective fine-tuning as stages: the student nears the teacher; good answers become likelier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.align.align import align
from moesaic.align.rewards import Judged
from moesaic.align.rollouts.on_policy_distill import OnPolicyStream
from moesaic.align.rollouts.rejection import Rule, chosen
from moesaic.align.rollouts.rollout import Sample
from moesaic.cli import main
from moesaic.data.packing import IGNORED
from moesaic.errors import UserError
from moesaic.model import lineage
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.train.objectives.distill import Distill
from moesaic.train.run import Run
from tests.align.made import ADAMW, recipe_of
from tests.serve.made import talking_model
from tests.train.test_objectives import CONFIG, batch


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A student, and its teacher."""
    return [talking_model(tmp_path_factory.mktemp(f"model{seed}"), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("questions") / "q.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"Say {n}", "answer": f"It is {n}"}) for n in range(12)))
    return file


def recipe(path, *stages: str):
    return recipe_of(path, *stages, more=ADAMW)


def metrics(path) -> list[dict]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def stage(teacher, questions, **options) -> str:
    options = {"steps": 12, "lr": 0.003, "evaluate_every": 0, "save_every": 50} | options
    more = ", ".join(f"{name}: {value}" for name, value in options.items())
    return f'{{name: distill, teacher: "{teacher}", data: [{{path: "{questions}"}}], {more}}}'


def apart(student, teacher) -> float:
    """The mean KL(teacher, student) on text neither has learned from."""
    tokens = [[5, 9, 17, 30, 41, 60, 71, 80, 93, 120]]
    one, other = (model.logits(tokens)[0].log_softmax(-1) for model in (teacher, student))
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize(
    "options",
    [{"on": "data", "batch_tokens": 200}, {"on": "policy", "prompts": 6, "max_tokens": 6, "direction": "reverse"}],
    ids=["data", "policy"],
)
def test_the_student_nears_its_teacher(places, questions, tmp_path, options):
    student, teacher = (moesaic.load(place) for place in places)
    align(recipe(tmp_path, stage(places[1], questions, **options)), places[0], tmp_path / "out", quiet=True)
    lines = metrics(tmp_path / "out")
    assert lines[-1]["loss/kl"] < 0.8 * lines[0]["loss/kl"]
    assert apart(moesaic.load(tmp_path / "out"), teacher) < apart(student, teacher)
    if options["on"] == "policy":
        assert 1 <= lines[0]["answer_tokens"] <= 6


def test_both_directions_are_the_plain_divergences(tmp_path):
    student, teacher, examples = Model(CONFIG).initialize(1), Model(CONFIG).initialize(2), batch([7, 12])
    kept = examples.targets_T != IGNORED
    one, other = (
        model.logits_at(model(examples.tokens_T, Layout(examples.lengths))).log_softmax(-1)[kept]
        for model in (teacher, student)
    )
    for direction, (p, q) in {"forward": (one, other), "reverse": (other, one)}.items():
        objective = Distill(teacher="", weight=1.0, direction=direction)
        objective._loaded[:] = [teacher]
        expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum") / examples.count
        torch.testing.assert_close(objective(student, examples, Routing()).total, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"on": "data", "batch_tokens": 100}, {"on": "policy", "prompts": 3, "max_tokens": 4}]
)
def test_a_stopped_stage_goes_on_to_the_same_bits(places, questions, tmp_path, monkeypatch, options):
    text = stage(places[1], questions, steps=3, save_every=1, **options)
    stop_and_go_on(lambda out: align(recipe(tmp_path, text), places[0], out, quiet=True), tmp_path, monkeypatch, 3)


def stop_and_go_on(run, tmp_path, monkeypatch, steps: int) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    plain = Run.finished
    for step in range(1, steps + 1):
        monkeypatch.setattr(
            Run,
            "finished",
            lambda run, at=step: setattr(run, "stopping", run.step >= at and not run.done()) or plain(run),
        )
        run(parts)
    timed = {"seconds", "tokens_per_second", "mfu"}
    one, other = ([{k: v for k, v in line.items() if k not in timed} for line in metrics(p)] for p in (whole, parts))
    assert one == other
    first, second = moesaic.load(whole).state_dict(), moesaic.load(parts).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_each_sequence_has_its_own_teacher():
    student, *teachers = (Model(CONFIG).initialize(seed) for seed in (1, 2, 3))
    whole, parts = batch([7, 12, 9]), []
    for teacher, lengths in ((0, [7, 9]), (1, [12])):
        rows = torch.cat([torch.arange(*span) for span in ([(0, 7), (19, 28)], [(7, 19)])[teacher]])
        one = replace(whole, tokens_T=whole.tokens_T[rows], targets_T=whole.targets_T[rows], lengths=lengths)
        parts.append(distilling(teachers[teacher])(student, one, Routing()).total)
    whole.columns["teacher"] = torch.tensor([0, 1, 0]).repeat_interleave(torch.tensor(whole.lengths))
    found = distilling(*teachers)(student, whole, Routing()).total
    torch.testing.assert_close(found, sum(parts), rtol=1e-5, atol=1e-6)
    only_first = distilling(teachers[0])(student, replace(whole, columns={}), Routing()).total
    assert not torch.allclose(found, only_first, rtol=1e-2)


def distilling(*teachers) -> Distill:
    objective = Distill(teacher="", weight=1.0, further=("",) * (len(teachers) - 1))
    objective._loaded[:] = teachers
    return objective


def test_earlier_stages_teach_what_they_learned(places, questions, tmp_path, monkeypatch):
    """Cross-stage distillation: two domains, one of them a world, with the stage that learned each as its teacher."""
    teaching = (
        f'[{{path: "{questions}", teacher: "stage:1"}}, {{environment: {{name: cards, turns: 2}}, teacher: "stage:2"}}]'
    )
    stages = [
        *(
            f'{{name: sft, data: [{{path: "{questions}"}}], steps: 2, lr: 0.05, seed: {seed}, batch_tokens: 100}}'
            for seed in (1, 2)
        ),
        f"{{name: distill, on: policy, data: {teaching}, steps: 3, lr: 0.01, save_every: 1, prompts: 4, max_tokens: 4, "
        "evaluate_every: 3, evaluate: 2}",
    ]
    base = talking_model(tmp_path / "base", context=4096)
    found: list[tuple[list[int], list[int]]] = []
    plain = OnPolicyStream.__next__

    def watched(stream):
        made = plain(stream)
        found.append((made.lengths, [int(part[0]) for part in made.columns["teacher"].split(made.lengths)]))
        return made

    monkeypatch.setattr(OnPolicyStream, "__next__", watched)
    align(recipe(tmp_path, *stages), base, tmp_path / "out", quiet=True)
    for lengths, teachers in found:  # by turns; episodes of a world are longer than questions
        assert sorted(teachers) == [0, 0, 1, 1]
        games, questioned = ([n for n, who in zip(lengths, teachers) if who == one] for one in (1, 0))
        assert min(games) > max(questioned)
    lines = metrics(tmp_path / "out")
    assert lines[0]["loss/kl"] > 0.01 and "accuracy/cards" in lines[-1]
    objective = lineage.read(tmp_path / "out")[-1]["recipe"]["train"]["objective"]
    assert [Path(one).name for one in (objective["teacher"], *objective["further"])] == ["1-sft", "2-sft"]


def test_a_source_that_cannot_be_taught_is_refused(places, questions, tmp_path):
    start = f'{{name: distill, teacher: "{places[1]}", on: policy, data: '
    for bad, message in (
        ("[{environment: nowhere}]}", "no such method"),
        ("[{environment: {name: tool_use, tools: [python]}}]}", "has no tasks of its own"),
        (f'[{{environment: cards, path: "{questions}"}}]}}', "has tasks of its own, and path names others"),
        (f'[{{path: "{questions}", teacher: 3}}]}}', "needs a teacher"),
        (f'[{{path: "{questions}", teacher: nowhere}}]}}', "no such directory"),
        (f'[{{path: "{questions}", teacher: "stage:1"}}]}}', "0 before the one that names it"),
        ('[{path: "no.jsonl", teacher: "stage:1"}]}', "no.jsonl: cannot be read"),
        (f'[{{path: "{questions}", teachers: x}}]}}', "every source of data is"),
    ):
        with pytest.raises(UserError, match=message):
            align(recipe(tmp_path, start + bad), places[0], tmp_path / "o", quiet=True)
    with pytest.raises(UserError, match="only with on: policy"):
        text = start.replace("on: policy, ", "") + f'[{{path: "{questions}", teacher: "{places[1]}"}}]}}'
        align(recipe(tmp_path, text), places[0], tmp_path / "o", quiet=True)


def test_a_teacher_of_another_vocabulary_is_refused(places, questions, tmp_path, capsys):
    other = tmp_path / "other"
    import transformers

    from moesaic.data.tokenizer_training import save_tokenizer, train_tokenizer

    # As large a vocabulary, of other words.
    transformers.AutoModelForCausalLM.from_pretrained(places[1]).save_pretrained(other)
    save_tokenizer(train_tokenizer(["entirely different words, quite unlike"] * 50, 300), other)
    recipe(tmp_path, stage(other, questions))
    given = ["align", str(tmp_path / "align.yaml"), "--model", str(places[0]), "--out", str(tmp_path / "o")]
    assert main(given) == 2
    assert "has another vocabulary than the model. A teacher must share" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="no such directory"):
        align(recipe(tmp_path, stage("nowhere", questions)), places[0], tmp_path / "o", quiet=True)
    for bad, message in (("weight: 0.5, on: policy", "weight is 1"), ("prompts: 0", "at least 1")):
        text = f'{{name: distill, teacher: "{places[1]}", data: [{{path: "{questions}"}}], {bad}}}'
        with pytest.raises(UserError, match=message):
            align(recipe(tmp_path, text), places[0], tmp_path / "o", quiet=True)
    with pytest.raises(UserError, match="needs a teacher"):
        align(recipe(tmp_path, f'{{name: distill, data: [{{path: "{questions}"}}]}}'), places[0], tmp_path / "o")


# -- rejective fine-tuning, then preferences from the same samples


def sample(text: str, score: float, reason: str = "stop") -> Sample:
    return Sample([1], [2], [0.0], [0], text, reason, Judged(score, {}))


def test_which_answers_are_kept_and_paired():
    samples = [sample("a", 0.2), sample("b", 1.0), sample("b ", 1.0), sample("c", 1.5), sample("d", 0.9), sample("", 0)]
    kept, pair = chosen(samples, Rule(right=1.0, keep=2, margin=0.0))
    assert [one.text for one in kept] == ["c", "b"]  # the best first, each once
    assert [one.text for one in pair] == ["c", "a"]
    assert chosen(samples, Rule(1.0, 1, margin=2.0)) == ([samples[3]], None)
    assert chosen([sample("a", 1.0, "length"), sample("b", 0.0)], Rule(1.0, 1, 0.0)) == ([], None)
    assert chosen([sample("a", 1.0)], Rule(1.0, 1, 0.0))[1] is None
    unjudged = Sample([1], [2], [0.0], [0], "perhaps right", "stop", Judged(0.0, {}, ("critique: no answer",)))
    assert [one.text for one in chosen([*samples, unjudged], Rule(1.0, 1, 0.0))[1]] == ["c", "a"]


REJECTION = (
    '{{name: rejection, steps: {steps}, lr: 0.003, data: [{{path: "{questions}"}}], prompts: 6, group: 6, '
    "max_tokens: 8, right: 0.5, keep: 2, batch_tokens: 80, evaluate_every: 0, save_every: 1, "
    "rewards: [{{name: length, max_length: 0, slack: 24, unit: characters}}]}}"
)


@pytest.fixture(scope="module")
def ending(places, tmp_path_factory):
    """A student that ends its answers: of a fresh model's hardly any do."""
    path = tmp_path_factory.mktemp("ending")
    lines = [
        {"question": f"Say {n}", "answer": text} for n in range(12) for text in ("yes", "It is", f"{n} as you like")
    ]
    (path / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)))
    talk = f'data: [{{path: "{path / "talk.jsonl"}"}}]'
    text = f"{{name: sft, steps: 40, lr: 0.005, {talk}, batch_tokens: 400, evaluate_every: 0}}"
    align(recipe(path, text), places[0], path / "out", quiet=True)
    return path / "out"


def test_good_answers_are_learned_and_set_against_bad_ones(ending, questions, tmp_path):
    preference = (
        '{name: preference, steps: 6, lr: 0.002, data: [{path: "stage:1/rejection/pairs.jsonl"}], batch_pairs: 4, '
        "evaluate_every: 0, objective: {sft: 0.1}}"
    )
    out = tmp_path / "out"
    align(recipe(tmp_path, REJECTION.format(steps=3, questions=questions), preference), ending, out, quiet=True)
    folder = out / "stages" / "1-rejection" / "rejection"
    files = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("samples", "kept", "pairs")
    }
    assert len(files["samples"]) == 36 and 0 < len(files["kept"]) <= 12 and files["pairs"]
    scores = {(line["messages"][-1]["content"], line["text"]): line["score"] for line in files["samples"]}
    for line in files["kept"]:
        question, answer = line["messages"]
        assert scores[question["content"], answer["content"]] >= 0.5
    for line in files["pairs"]:
        question = line["messages"][-1]["content"]
        assert scores[question, line["chosen"]] >= 0.5 > scores[question, line["rejected"]]
    first = metrics(out / "stages" / "1-rejection")
    assert first[0]["answers_kept"] == len(files["kept"]) and first[0]["pairs_made"] == len(files["pairs"])
    assert first[-1]["loss"] < first[0]["loss"]
    assert metrics(out)[-1]["pairs_right"] > 0.5 and metrics(out)[-1]["reward_margin"] > 0


def test_samples_are_drawn_once(ending, questions, tmp_path, monkeypatch):
    text = REJECTION.format(steps=2, questions=questions)
    stop_and_go_on(lambda out: align(recipe(tmp_path, text), ending, out, quiet=True), tmp_path, monkeypatch, 2)
    import moesaic.align.rollouts.rejection as module

    monkeypatch.setattr(module, "generate", lambda *_: pytest.fail("sampled again"))
    align(recipe(tmp_path, text), ending, tmp_path / "whole", quiet=True)


def test_no_good_answer_is_an_error(ending, questions, tmp_path):
    text = REJECTION.format(steps=2, questions=questions).replace("right: 0.5", "right: 7.0")
    with pytest.raises(UserError, match="none of 36 completions scored 7 and ended by itself"):
        align(recipe(tmp_path, text), ending, tmp_path / "o", quiet=True)
