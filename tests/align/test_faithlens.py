"""FaithLens: claims whose labels are known, rewards of explanations, the filters, and a detector that is a reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.align.align import align
from moesaic.align.critiques.judges import EngineJudge, Question
from moesaic.align.rewards import judge, weighted_rewards
from moesaic.align.rewards.detector import Detector, grammar
from moesaic.align.rewards.explained import Explained
from moesaic.align.rollouts.diverse import diverse
from moesaic.data.tasks import Task, score, tasks
from moesaic.data.tasks.claims import PLANTED, label_of, prompt
from moesaic.data.tasks.statements import PEOPLE, read
from moesaic.errors import UserError
from moesaic.recipe import load_recipe
from moesaic.train.report.metrics import read_metrics
from moesaic.worlds.judges import Answer
from tests.align.made import ADAMW, assert_refused, recipe_of


def some(count: int, options: str = "") -> list[Task]:
    return [tasks(f"claims:{options}" if options else "claims", "train", number) for number in range(count)]


def said(task: Task, text: str | None = None, reply: str | None = None) -> Answer:
    answer = Answer(task.question, task.solution if text is None else text, truth=task.answer, task=task)
    replies = {} if reply is None else dict.fromkeys(Explained().asks(answer), reply)
    return Answer(task.question, answer.text, truth=task.answer, task=task, replies=replies)


def passage(task: Task) -> str:
    return task.question.partition("Text: ")[2].partition("\n")[0]


class TestClaims:
    def test_a_claim_is_faithful_if_the_passage_states_all_of_it(self) -> None:
        kinds = set()
        for task in some(120):
            stated = {f"{one}." for one in passage(task).rstrip(".").split(". ")}
            claimed = {f"{one}." for one in task.metadata["claim"].rstrip(".").split(". ")}
            assert (task.answer == "yes") == (claimed <= stated), task.question
            assert score(task, task.solution) == 1 and score(task, task.answer) == 0
            kinds.add(task.metadata["kind"])
        assert kinds == {"faithful", *PLANTED}

    def test_each_hallucination_is_what_it_says(self) -> None:
        for task in some(120):
            claimed = [f"{one}." for one in task.metadata["claim"].rstrip(".").split(". ")]
            wrong = [one for one in claimed if one not in passage(task)]
            if task.metadata["kind"] == "negation":
                assert [" not " in one for one in wrong] == [True] and read(wrong[0]) is None
            elif task.metadata["kind"] == "number":
                assert read(wrong[0]).object.isdigit()
            elif task.metadata["kind"] == "relation":
                turned = read(wrong[0])
                assert {turned.subject, turned.object} <= set(PEOPLE)
                assert f"{turned.object} was taught by {turned.subject}." in passage(task)
            elif task.metadata["kind"] == "added":
                assert len(claimed) > 1 and wrong == claimed[-1:]

    def test_a_teacher_errs_as_often_as_it_is_said_to(self) -> None:
        erring = some(200, "mislabelled=0.3,unexplained=0.4")
        assert 0.2 < sum(score(task, task.solution) < 1 for task in erring) / 200 < 0.4
        helpful = [task.solution.split("</expl")[0] for task in some(200)]
        assert 0.3 < sum(t.solution.split("</expl")[0] != h for t, h in zip(erring, helpful, strict=True)) / 200 < 0.5

    @pytest.mark.parametrize("options", ["facts=20", "faithful=2", "kinds=3"])
    def test_options_that_do_not_fit_are_refused(self, options: str) -> None:
        with pytest.raises(UserError, match="options of claims do not fit"):
            tasks(f"claims:{options}", "train", 0)


class TestExplained:
    def test_a_reader_of_the_explanation_alone_must_find_the_label(self) -> None:
        for task in some(6):
            (question,) = Explained().asks(said(task))
            assert task.metadata["claim"] in question and passage(task) not in question
            other = {"yes": "no", "no": "yes"}[task.answer]
            assert Explained()(said(task, reply=task.answer)) == 1 and Explained()(said(task, reply=other)) == 0
            assert Explained()(said(task, text=f"<label>{task.answer}</label>")) == 0  # nothing is explained

    def test_another_model_may_read(self, base: Path) -> None:
        found = some(6)
        judged = Explained(reader=str(base)).each([said(task) for task in found])
        judge_itself = EngineJudge(base)
        for task, worth in zip(found, judged, strict=True):
            (question,) = Explained().asks(said(task))
            (reply,) = judge_itself.replies([Question(question, 'start: "yes" | "no"', 8)], 0.0)
            assert worth == (reply == task.answer)


class TestDetector:
    def test_its_label_is_the_reward(self, base: Path) -> None:
        found = [tasks("context_qa:changed=0.5", "train", number) for number in range(8)]
        answers = [Answer(task.question, task.solution, truth=task.answer, task=task) for task in found]
        judged = Detector(str(base), tokens=8).each(answers)
        alone = EngineJudge(base)
        for task, worth in zip(found, judged, strict=True):
            claim = task.solution.partition("<long_answer>")[2].partition("</long_answer>")[0]
            text = prompt(passage(task), claim, False)
            (reply,) = alone.replies([Question(text, grammar(8), 40)], 0.0)
            assert worth == (1.0 if "does not say" in claim else float(label_of(reply) == "yes"))
        assert {0.0} == set(Detector(str(base)).each([Answer(found[0].question, "", task=found[0])]))

    def test_lines_may_bring_the_passage(self, base: Path) -> None:
        given = Answer("q", "<long_answer>Rain is wet.</long_answer>", facts={"passage": "Rain is wet."})
        (worth,) = Detector(str(base), tokens=4).each([given])
        assert worth in (0.0, 1.0)
        (judged,) = judge([("detector", 1.0, Detector(str(base)))], [Answer("q", given.text)])
        assert "without a passage" in judged.problems[0]


class TestDiversity:
    def test_what_is_unlike_the_others_is_chosen(self) -> None:
        texts = [f"the cat sat on mat number {n}" for n in range(6)] + [
            "rain fell",
            "rain fell",
            "a bird sang all night",
        ]
        chosen = diverse(texts, 3)
        assert len(chosen) == 3 and {texts[n].split()[0] for n in chosen} == {"the", "rain", "a"}
        assert diverse(texts, 99) == list(range(len(texts)))

    def test_a_rejection_stage_keeps_those(self, base: Path, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("moesaic.align.rollouts.rejection.chosen", lambda samples, rule: (samples[:1], None))
        stage = (
            '{name: rejection, steps: 1, lr: 0.001, data: [{path: "builtin:claims:instructions=false"}], prompts: 6, '
            "group: 2, max_tokens: 6, rewards: [{name: repetition}], diverse: SHARE, evaluate_every: 0}"
        )
        kept = {}
        for share in (1.0, 0.5):
            out = tmp_path / str(share)
            align(recipe_of(tmp_path, stage.replace("SHARE", str(share)), more=ADAMW), base, out, quiet=True)
            kept[share] = [json.loads(line) for line in (out / "rejection/kept.jsonl").read_text().splitlines()]
        assert len(kept[0.5]) == -(-len(kept[1.0]) // 2) < len(kept[1.0])
        assert all(line in kept[1.0] for line in kept[0.5])


def test_the_recipe_runs_from_end_to_end(base: Path, tmp_path: Path, monkeypatch) -> None:
    """A model that knows nothing passes no filter, so here they let everything through."""
    monkeypatch.setattr("moesaic.align.rollouts.rejection.chosen", lambda samples, rule: (samples[:1], None))
    stages = load_recipe(Path("recipes/faithlens.yaml")).dump()["align"]["stages"]
    assert [stage["name"] for stage in stages] == ["sft", "rejection", "policy"]
    small = {"steps": 1, "prompts": 2, "group": 2, "max_tokens": 4, "batch_tokens": 256, "evaluate_every": 0}
    short = [stage | {key: value for key, value in small.items() if key in stage} for stage in stages]
    recipe = load_recipe(Path("recipes/faithlens.yaml"), [f"align.stages={json.dumps(short)}"])
    done = align(recipe, base, tmp_path / "out", quiet=True)["stages"]
    assert [one["outcome"] for one in done] == ["finished"] * 3


def test_rl_on_label_and_explanation(base: Path, tmp_path: Path) -> None:
    stage = (
        '{name: policy, steps: 2, lr: 0.001, data: [{path: "builtin:claims:instructions=false"}], prompts: 2, '
        "group: 2, max_tokens: 6, "
        "rewards: [{name: task}, {name: explained}, {name: format, tags: [explanation, label]}]}"
    )
    align(recipe_of(tmp_path, stage, more=ADAMW), base, tmp_path / "out", quiet=True)
    lines = read_metrics(tmp_path / "out")
    assert all(line["reward_problems"] == 0 and line["mismatch_max"] == 0 for line in lines if "mismatch_max" in line)
    assert "reward/explained" in lines[-1]


def test_what_cannot_judge_the_data_is_refused(base: Path, tmp_path: Path) -> None:
    policy = '{name: policy, data: [{path: "builtin:DATA"}], rewards: [REWARD]}'
    for data, reward, message in (
        ("context_qa", "{name: explained}", "no prompt of data has a claim"),
        ("claims:brief=1", "{name: explained}", "no prompt of data has a claim"),
        ("gcd", f'{{name: detector, model: "{base}"}}', "no prompt of data has a passage"),
    ):
        assert_refused(tmp_path, base, policy.replace("DATA", data).replace("REWARD", reward), message)
    with pytest.raises(UserError):
        weighted_rewards([{"name": "detector", "model": str(tmp_path / "none")}])
