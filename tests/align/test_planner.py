"""EAGLET in worlds: an executor plays with a plan before it, and a plan is worth what it gains, for one or for all."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesaic.align.align import align
from moesaic.align.examples import Mixture
from moesaic.align.rollouts.branching import BranchRule, collect_steps
from moesaic.recipe import load_recipe
from moesaic.serve.parsers import Message
from moesaic.worlds.environments.planner import HINT, REQUEST, Executor, Planner
from moesaic.worlds.environments.sql import Database
from moesaic.worlds.playing import Conversation
from moesaic.worlds.text_actions import WorldExamples
from tests.align.made import ADAMW, assert_refused, recipe_of
from tests.serve.made import talking_model
from tests.worlds.solvers import next_action

RECIPE = Path(__file__).parents[2] / "recipes/world-planner.yaml"
ASK, HURRY, SING = "ask first", "hurry", "sing a song"
HELPED_BY = {"early": {ASK}, "late": {ASK, HURRY}}  # by which plans each executor is helped


class Following:
    """An executor that solves a task if it was told a plan that helps it, and does nothing else. With `ASK` it looks
    around first, with `HURRY` it does not."""

    def __init__(self, engine: str, sampling: dict[str, Any]) -> None:
        self.name = engine

    def say(self, asked: Sequence[tuple[int, Conversation]]) -> list[str | None]:
        found: list[str | None] = []
        for _, messages in asked:
            task, _, plan = str(messages[0]["content"]).partition(HINT)
            after = [dict(message) for message in messages[1:]]
            if plan not in HELPED_BY[self.name]:
                found.append("I do not know.")
            elif plan == ASK and not after:
                found.append("Action: SELECT 1")
            else:
                found.append(f"Action: {next_action([{'role': 'user', 'content': task}, *after[2 * (plan == ASK) :]])}")
        return found


@pytest.fixture
def executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesaic.worlds.environments.planner.load", lambda directory, **options: directory)
    monkeypatch.setattr("moesaic.worlds.environments.planner.Engine", lambda model, **options: model)
    monkeypatch.setattr("moesaic.worlds.environments.planner.EnginePlayer", Following)


def gain(planner: Planner, plan: str) -> float:
    episode = planner.begin(planner.example(0, "train 0"))
    step = episode.step(Message(f" {plan} "))
    assert step.done
    return step.reward


@pytest.mark.usefixtures("executors")
def test_a_plan_is_worth_what_the_executor_gains_by_it_in_a_world() -> None:
    planner = Planner(executor="late", world="sql", attempts=2)
    example = planner.example(3, "train 0")
    assert example.messages[0]["content"] == REQUEST + str(Database().example(3, "train 0").messages[0]["content"])
    assert planner.begin(example).messages == list(example.messages)
    assert [gain(planner, plan) for plan in (ASK, HURRY, SING)] == [1.0, 1.0, 0.0]
    # The plan with the turn more is worth less, where turns count.
    slow = Planner(executor="late", world="sql", attempts=2, decay=0.5)
    assert [gain(slow, plan) for plan in (ASK, HURRY)] == [0.125, 0.25]


@pytest.mark.usefixtures("executors")
def test_the_same_plan_for_the_same_task_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, rated = Planner(executor="late", world="sql", attempts=1), []
    rate = Executor.rate
    monkeypatch.setattr(Executor, "rate", lambda self, task, plan: rated.append(plan) or rate(self, task, plan))
    assert [gain(planner, plan) for plan in (HURRY, SING, HURRY)] == [1.0, 0.0, 1.0]
    assert rated == [HINT + HURRY, "", HINT + SING]


@pytest.mark.usefixtures("executors")
def test_of_several_executors_the_mean_or_the_least_counts() -> None:
    both = ("early", "late")
    assert [gain(Planner(executor=both, world="sql"), plan) for plan in (ASK, HURRY, SING)] == [1.0, 0.5, 0.0]
    agreed = Planner(executor=both, world="sql", by="min")
    assert [gain(agreed, plan) for plan in (ASK, HURRY, SING)] == [1.0, 0.0, 0.0]


class Plans:
    """A model that draws a plan by the request's seed."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def request(self, prompt: list[int], sampling: Any) -> Any:
        return SimpleNamespace(prompt=prompt, sampling=sampling)

    def complete(self, requests: Sequence[Any]) -> list[Any]:
        plans = [random.Random(one.sampling.seed).choice((ASK, HURRY, SING)) for one in requests]
        return [SimpleNamespace(text=plan, finish_reason="stop") for plan in plans]


@pytest.mark.usefixtures("executors")
def test_the_cold_start_keeps_plans_that_help_every_executor(tmp_path: Path) -> None:
    """Homologous consensus filtering; the stage that follows may learn from the pairs, too."""
    import moesaic

    model = moesaic.load(talking_model(tmp_path / "base", context=2048))
    kept: dict[str, set[str]] = {}
    for by in ("mean", "min"):
        planner = Planner(executor=("early", "late"), world="sql", by=by, attempts=1)
        examples = Mixture([WorldExamples(planner, 0)], [1.0])
        folder = tmp_path / by
        sampling, rule = {"max_tokens": 8}, BranchRule(right=0.5, pairs=2, margin=0.0)
        collect_steps(Plans(model.tokenizer), planner, examples, 12, 2, sampling, rule, 0, folder, "k")  # type: ignore[arg-type]
        lines = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
        assert all(line["messages"][0]["content"].startswith(REQUEST) for line in lines)
        kept[by] = {line["messages"][-1]["content"] for line in lines}
    assert kept == {"mean": {ASK, HURRY}, "min": {ASK}}


def test_a_planner_is_trained_in_a_world(tmp_path: Path) -> None:
    """By itself from the tasks of the world, with a real executor and without data."""
    base = talking_model(tmp_path / "base", context=2048)
    world = f"{{name: planner, executor: {base}, world: {{name: sql, turns: 2}}, attempts: 1, max_tokens: 4}}"
    stage = (
        f"{{name: policy, steps: 2, environment: {world}, prompts: 1, group: 2, max_tokens: 6, evaluate: 1, "
        "evaluate_every: 2, rewards: [{name: environment}, {name: repetition, n: 1, unit: characters}]}"
    )
    align(recipe_of(tmp_path, stage, more=ADAMW), base, tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["mismatch_max"] == 0 and line["reward_problems"] == 0 for line in lines)
    assert lines[-1]["accuracy"] == 0.0


def test_the_recipe_runs(tmp_path: Path) -> None:
    base = talking_model(tmp_path / "base", context=8192)
    both = json.dumps([str(base), str(base)])
    given = [f"0.environment.executor={both}", f"1.environment.executor={base}", "0.right=-1.0"]
    for stage in (0, 1):
        small = {"steps": 1, "prompts": 1, "group": 2, "max_tokens": 4, "evaluate_every": 0, "environment.attempts": 1}
        small |= {"environment.max_tokens": 4, "environment.world.turns": 1}
        given += [f"{stage}.{key}={value}" for key, value in small.items()]
    recipe = load_recipe(RECIPE, [*(f"align.stages.{one}" for one in given), "align.stages.0.max_length=8000"])
    done = align(recipe, base, tmp_path / "out", quiet=True)
    assert [stage["stage"] for stage in done["stages"]] == ["trajectories", "policy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("executor: nowhere, world: cards", "nowhere: no such directory"),
        ("executor: [], world: cards", "at least one attempt"),
        ("executor: out, world: tool_use", "tasks of its own"),
        ("executor: out, world: {name: cards, size: huge}", "size is one of"),
        ("executor: out, world: cards, decay: 0", "decay is above 0"),
        ("executor: out, world: cards, by: most", "by"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(tmp_path: Path, options: str, message: str) -> None:
    base = talking_model(tmp_path / "base")
    stage = f"{{name: policy, environment: {{name: planner, {options}}}, rewards: [{{name: environment}}]}}"
    assert_refused(tmp_path, base, stage, message)
