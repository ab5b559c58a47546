"""CANOE: questions with checkable answers, rewards that look at what a long answer says, and the policy's own proxy
answers, wherever rollouts come from."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moesaic.align.align import align
from moesaic.align.rewards import Judged, Reward, judge, reward_of, weighted_rewards
from moesaic.align.rewards.faithfulness import Faithfulness
from moesaic.align.rewards.supported import Supported
from moesaic.align.rollouts.pool import Rollout, RolloutPool
from moesaic.align.rollouts.rollout import generate
from moesaic.data.tasks import Task, score, tasks
from moesaic.data.tasks.statements import COUNTRIES, Statement, read
from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.train.report.metrics import read_metrics
from moesaic.worlds.completions import prompt_tokens, requests_for
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer
from tests.align.made import ADAMW, assert_line_refused, assert_refused, recipe_of, without_times

SAMPLING = {"max_tokens": 5, "temperature": 1.0}


def some(options: str, kind: str, count: int = 12) -> list[Task]:
    found = [tasks(f"context_qa:{options}" if options else "context_qa", "train", n) for n in range(count * 8)]
    return [task for task in found if task.metadata["kind"] == kind][:count]


def said(task: Task, reply: str | None = None, text: str | None = None) -> Answer:
    """An answer, and what the policy says if it has only the long one."""
    answer = Answer(task.question, task.solution if text is None else text, truth=task.answer, task=task)
    replies = {} if reply is None else dict.fromkeys(Faithfulness().asks(answer), reply)
    return Answer(task.question, answer.text, truth=task.answer, task=task, replies=replies)


class TestQuestions:
    def test_each_kind_is_what_it_says(self) -> None:
        for task in some("", "straightforward"):
            (needed,) = task.metadata["needed"]
            assert needed in task.metadata["passage"] and needed[2] == task.answer
        for task in some("", "multi_hop"):
            first, last = task.metadata["needed"]
            assert first[2] == last[0] and last[2] == task.answer and last[0] not in task.metadata["bare_question"]
            assert first in task.metadata["passage"] and last in task.metadata["passage"]
        for task in some("", "counterfactual"):
            (needed,) = task.metadata["needed"]
            assert needed in task.metadata["passage"] and task.answer not in COUNTRIES[needed[0]]
        for task in some("", "unanswerable"):  # it is asked of someone the passage speaks of, for something else
            subjects = {statement[0] for statement in task.metadata["passage"]}
            assert task.answer == "unknown" and any(name in task.metadata["bare_question"] for name in subjects)

    def test_statements_are_read_as_they_are_told(self) -> None:
        for task in some("", "straightforward"):
            text = re.search(r"Text: (.*)", task.question)[1]
            assert [list(read(f"{s}.")) for s in text.rstrip(".").split(". ")] == task.metadata["passage"]

    def test_its_own_solutions_are_right_and_splits_apart(self) -> None:
        for n in range(8):
            task, other = (tasks("context_qa", split, n) for split in ("train", "test"))
            assert score(task, task.solution) == 1 == score(other, other.solution)
            assert score(task, task.answer) == 0  # it was asked at length
            assert task.question != other.question
        brief = tasks("context_qa:brief=1", "train", 0)
        assert score(brief, brief.answer) == 1

    def test_a_passage_told_again(self) -> None:
        task = tasks("context_qa:retell=1", "train", 0)
        assert score(task, task.answer) == 1 and task.answer.split(". ") == sorted(task.answer.split(". "))
        assert {s + "." for s in task.answer.rstrip(".").split(". ")} == {
            Statement(*one).told() for one in task.metadata["passage"]
        }

    @pytest.mark.parametrize("options", ["facts=2", "changed=0.8,added=0.4", "multi_hop=-1", "hops=2"])
    def test_options_that_do_not_fit_are_refused(self, options: str) -> None:
        with pytest.raises(UserError, match="options of context_qa do not fit"):
            tasks(f"context_qa:{options}", "train", 0)


@pytest.mark.parametrize("kind", ["straightforward", "multi_hop", "counterfactual", "unanswerable"])
def test_planted_hallucinations_are_found(kind: str) -> None:
    for planted, worth in (("", 1.0), ("changed=1", 0.0), ("added=1", 0.0)):
        assert [Supported()(said(task)) for task in some(planted, kind)] == [worth] * 12


class TestReward:
    @pytest.mark.parametrize("kind", ["straightforward", "multi_hop", "counterfactual", "unanswerable"])
    def test_the_default_gives_most_to_the_perfect_answer(self, kind: str) -> None:
        (task,) = some("", kind, 1)
        reward = Faithfulness()
        assert reward(said(task, f"{task.answer}.")) == 3
        assert reward(said(task, f"<answer>{task.answer}</answer>")) == 3
        assert reward(said(task, text=re.sub("<long_answer>.*</long_answer>", "", task.solution))) == 1
        assert reward(said(task, text=task.answer)) == 0
        assert reward(said(task, task.answer, task.solution + "!")) == 2

    def test_without_the_long_form(self) -> None:
        (task,) = some("", "straightforward", 1)
        short = re.sub("<long_answer>.*</long_answer>", "", task.solution)
        assert Faithfulness(long_form=False)(said(task, text=short)) == 2

    def test_lines_may_bring_the_question_alone(self) -> None:
        facts = {"bare_question": "Where is it?", "answers": ["Rome", "in Rome"]}
        answer = Answer(
            "...", "<think>t</think><long_answer>It is there.</long_answer><answer>Rome</answer>", facts=facts
        )
        (question,) = Faithfulness().asks(answer)
        assert "It is there." in question and "Where is it?" in question and "<" not in question
        with pytest.raises(ValueError, match="was not asked"):
            Faithfulness()(answer)


def test_what_a_long_answer_does_not_say_is_worth_less() -> None:
    for task in some("changed=1", "straightforward"):
        wrong = said(task).text.partition("<long_answer>")[2].partition("</long_answer>")[0]
        (question,) = Faithfulness().asks(said(task))
        assert wrong in question and task.question.partition("Text: ")[2].partition("\n")[0] not in question
        (judged,) = judge([("faithfulness", 1.0, Faithfulness())], [said(task, read(wrong).object)])
        assert judged.total == 2  # its form and its short answer are right


class Asks(Reward):
    """Wants to know two things of every answer, one the same for all; gives a number that tells replies apart."""

    def asks(self, answer: Answer) -> dict[str, int]:
        return {"Say it again.": 3, f"Is {answer.text!r} right?": 4}

    def __call__(self, answer: Answer) -> float:
        return float(
            sum(ord(letter) * n for n, letter in enumerate("".join(answer.replies[q] for q in self.asks(answer))))
        )


REWARDS: list[tuple[str, float, Reward]] = [("asks", 1.0, Asks())]
EXAMPLES = [Example(({"role": "user", "content": text},)) for text in ("What?", "Where?")]


def asked_alone(model: Model, text: str) -> float:
    engine, replies = Engine(model), {}
    for question, tokens in Asks().asks(Answer("", text)).items():
        prompt = prompt_tokens(engine.tokenizer, [{"role": "user", "content": question}])
        (done,) = engine.complete([engine.request(prompt, Sampling(max_tokens=tokens, temperature=0.0))])
        replies[question] = done.text
    return Asks()(Answer("", text, replies=replies))


def test_the_policy_replies_in_the_engine_it_answered_in(model: Model) -> None:
    model.mode = "invariant"
    engine = Engine(model)
    rollouts = generate(engine, EXAMPLES, 2, SAMPLING, REWARDS, [1, 2])
    for sample in (sample for group in rollouts.groups for sample in group):
        assert sample.judged == Judged(asked_alone(model, sample.text), {"asks": sample.judged.total})
        assert len(sample.tokens) <= 5  # and nothing of the replies is learned from
    assert engine.counts.generated_tokens > sum(len(s.tokens) for group in rollouts.groups for s in group)

    def single_turn(engine: Engine, example: Example, seed: int) -> list[Rollout]:
        return [Rollout(example, request) for request in requests_for(engine, example, 2, SAMPLING, seed)]

    # As a worker has it: groups come and go, and each is judged when its replies are there.
    pool, found = RolloutPool(Engine(model), REWARDS), {}
    for number, example in enumerate(EXAMPLES):
        pool.add(number, single_turn(pool.engine, example, number + 1))
    while pool.groups:
        found |= dict(pool.step())
        if not pool.engine.working:
            pool.changed.wait(1.0)
    pool.close()
    for number, group in enumerate(rollouts.groups):
        assert [(s.text, s.judged) for s in found[number]] == [(s.text, s.judged) for s in group]


def test_a_run_that_asks_resumes_to_the_same_bits_and_its_mismatch_is_0(
    base: Path, tmp_path: Path, monkeypatch
) -> None:
    """A model that knows nothing writes no tags, so everything it writes is its long answer here."""
    monkeypatch.setattr(Faithfulness, "asks", Asks.asks)
    monkeypatch.setattr(Faithfulness, "__call__", lambda self, answer: Asks()(answer) % 7)
    stage = (
        '{name: policy, steps: STEPS, lr: 0.003, data: [{path: "builtin:context_qa:instructions=false"}], '
        "prompts: 2, group: 2, max_tokens: 5, rewards: [{name: faithfulness}, {name: supported, weight: 0}], "
        "save_every: 2, evaluate_every: 2, evaluate: 2}"
    )
    for out, steps in (("whole", 4), ("stopped", 2), ("stopped", 4)):
        align(recipe_of(tmp_path, stage.replace("STEPS", str(steps)), more=ADAMW), base, tmp_path / out, quiet=True)
    whole, stopped = (read_metrics(tmp_path / out) for out in ("whole", "stopped"))
    assert without_times(whole, {"expert_load"})[-1] == without_times(stopped, {"expert_load"})[-1]
    assert (tmp_path / "whole/model.safetensors").read_bytes() == (tmp_path / "stopped/model.safetensors").read_bytes()
    assert {line["mismatch_max"] for line in whole if "mismatch_max" in line} == {0.0}
    assert {"held_out/faithfulness", "held_out/supported"} <= whole[-1].keys()
    assert all(line.get("reward_problems", 0) == 0 for line in whole)


class TestRefused:
    def test_a_reward_that_can_judge_nothing_of_the_data(self, base: Path, tmp_path: Path) -> None:
        policy = '{name: policy, data: [{path: "builtin:DATA"}], rewards: [{name: REWARD}]}'
        for data, reward, message in (
            ("gcd", "faithfulness", "no prompt of data has a bare_question"),
            (
                "context_qa:think=false",
                "faithfulness",
                "has the tags think, long_answer, answer; it has long_answer, answer",
            ),
            ("gcd", "supported", "no prompt of data has a passage"),
            ("gcd", "code_tests", "no prompt of data has tests"),
        ):
            assert_refused(tmp_path, base, policy.replace("DATA", data).replace("REWARD", reward), message)
        assert not (tmp_path / "out").exists()

    def test_lines_without_what_it_judges_by(self, base: Path, tmp_path: Path) -> None:
        line = json.dumps({"question": "Where is it, if it is in Rome?", "answer": "Rome"})
        stage = "policy, rewards: [{name: faithfulness}]"
        assert_line_refused(tmp_path, base, stage, line, "no prompt of data has a bare_question")
        assert_line_refused(tmp_path, base, "policy, rewards: [{name: exact}]", '{"question": "?"}', "a right answer")

    def test_an_environment_cannot_ask_the_policy(self) -> None:
        with pytest.raises(UserError, match="asks the policy"):
            reward_of({"name": "faithfulness"})

    def test_tags(self) -> None:
        with pytest.raises(UserError, match="tags are at least two"):
            weighted_rewards([{"name": "faithfulness", "tags": ["answer"]}])
