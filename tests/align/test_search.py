"""RAG-Gym from end to end: process data by branching, a critic that is better than chance, and the recipe."""

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
from moesaic.align.rollouts.branching import BranchRule, branch, collect_steps
from moesaic.errors import UserError
from moesaic.know.answer.writer import Conversation, Form
from moesaic.model.transformer import Model
from moesaic.recipe import load_recipe
from moesaic.serve.parsers import Message
from moesaic.worlds.critic import BestOfN, Candidates, Critic, best
from moesaic.worlds.environments.multihop import Multihop
from moesaic.worlds.text_actions import WorldExamples
from tests.align.made import ADAMW, recipe_of
from tests.align.test_environments import conversation
from tests.serve.made import talking_model
from tests.worlds.solvers import next_action

SMALL: dict[str, Any] = {"people": 5, "passages": 1, "turns": 4, "instructions": "Find the answer."}
RECIPE = Path(__file__).parents[2] / "recipes/know-search.yaml"


def actions(messages: Sequence[Any]) -> list[str]:
    """The right one; a query that brings up nothing of use; no action at all."""
    return [f"Action: {next_action([dict(m) for m in messages])}", "Action: search population", "Let me think."]


class Scripted:
    """Draws one of these actions by the request's seed."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def request(self, prompt: list[int], sampling: Any) -> Any:
        return SimpleNamespace(prompt=prompt, sampling=sampling)

    def complete(self, requests: Sequence[Any]) -> list[Any]:
        said = [conversation(self.tokenizer.decode(request.prompt, special=True)) for request in requests]
        return [
            SimpleNamespace(text=random.Random(one.sampling.seed).choice(actions(messages)), finish_reason="stop")
            for one, messages in zip(requests, said, strict=True)
        ]


def collected(model: Model, folder: Path, prompts: int = 12, **process: float) -> dict[str, list[dict[str, Any]]]:
    world = Multihop(**SMALL, process=process)
    examples = Mixture([WorldExamples(world, 0)], [1.0])
    rule = BranchRule(right=1.0, pairs=2, margin=0.0)
    collect_steps(Scripted(model.tokenizer), world, examples, prompts, 6, {"max_tokens": 64}, rule, 0, folder, "k")  # type: ignore[arg-type]
    names = ("samples", "kept", "pairs")
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in names}


def test_branching_keeps_good_episodes_and_pairs_actions_at_the_same_state(model: Model, tmp_path: Path) -> None:
    found = collected(model, tmp_path / "a")
    assert found == collected(model, tmp_path / "b")  # the same seed
    assert len(found["kept"]) >= 8 and len(found["pairs"]) >= 20
    for line in found["kept"]:
        *_, last = line["messages"]
        assert last["role"] == "assistant" and last["content"] == f"Action: {next_action(line['messages'][:-1])}"
    rights = 0
    for line in found["pairs"]:
        right, *wrong = actions(line["messages"])
        assert line["rejected"][0]["content"] in wrong and line["gap"] > 0
        rights += line["chosen"] == [{"role": "assistant", "content": right}]
    assert rights >= 0.8 * len(found["pairs"])  # at a few states it was not among the six that were drawn
    scores = [[action["score"] for action in line["actions"]] for line in found["samples"]]
    assert all(own == sorted(own, reverse=True) for own in scores)


def test_without_process_rewards_the_pairs_are_others(model: Model, tmp_path: Path) -> None:
    """The idea removed: queries are no longer told apart, so they are in no pair, and fewer episodes get anywhere."""
    found = collected(model, tmp_path / "a")
    zeroed = collected(model, tmp_path / "b", sufficiency=0.0, utility=0.0, novelty=0.0)

    def queries(lines: Sequence[dict[str, Any]]) -> int:
        return sum(line["chosen"][0]["content"].startswith("Action: search") for line in lines)

    assert queries(found["pairs"]) >= 10 and queries(zeroed["pairs"]) == 0
    assert len(zeroed["kept"]) < len(found["kept"])


def test_branching_says_when_nothing_went_well(model: Model, tmp_path: Path) -> None:
    world = Multihop(people=5, turns=1)  # no room for a query and an answer
    examples = Mixture([WorldExamples(world, 0)], [1.0])
    rule = BranchRule(1.0, 2, 0.0)
    with pytest.raises(UserError, match="none of 2 episodes"):
        collect_steps(Scripted(model.tokenizer), world, examples, 2, 2, {"max_tokens": 9}, rule, 0, tmp_path, "k")  # type: ignore[arg-type]
    (one,) = branch(Scripted(model.tokenizer), world, [world.example(0)], 4, {"max_tokens": 9}, 0)  # type: ignore[arg-type]
    assert one.over and one.reward == 0.0 and len(one.states) == 1


class Drawing:
    """A Writer that knows as little as `Scripted`."""

    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        return [random.Random(f"{seed} {number}").choice(actions(said)) for number, said in enumerate(conversations)]


class Chance:
    def __init__(self) -> None:
        self.draw = random.Random(0)

    def scores(self, candidates: Candidates, tools: Any = None) -> list[list[float]]:
        return [[self.draw.random() for _ in texts] for _, texts in candidates]


def solved(writer: Any, world: Multihop, count: int) -> float:
    """The share of held-out worlds in which it finds the answer."""
    right = 0.0
    for number in range(count):
        episode = world.begin(world.example(number))
        messages = list(episode.messages)
        for turn in range(world.turns):
            (text,) = writer.write([messages], max_tokens=64, seed=turn)
            step = episode.step(Message(text))
            messages += [{"role": "assistant", "content": text}, *step.messages]
            right += step.reward
            if step.done:
                break
    return right / count


def test_a_critic_of_step_pairs_chooses_better_than_chance(model: Model, base: Path, tmp_path: Path) -> None:
    collected(model, tmp_path / "steps", prompts=16)
    pairs = f"{tmp_path}/steps/pairs.jsonl"
    stage = f'{{name: reward_model, steps: 16, lr: 0.004, data: [{{path: "{pairs}"}}], batch_pairs: 8}}'
    align(recipe_of(tmp_path, stage, more=ADAMW), base, tmp_path / "critic", quiet=True)
    critic = Critic.open(tmp_path / "critic")
    world = Multihop(**SMALL)
    by_critic = solved(BestOfN(Drawing(), critic, n=5), world, 10)
    by_chance = solved(BestOfN(Drawing(), Chance(), n=5), world, 10)
    assert by_critic >= by_chance + 0.4, (by_critic, by_chance)
    assert best([1.0, 3.0, 3.0]) == 1
    long = [{"role": "user", "content": "a b c " * 500}]  # longer than the critic's context
    assert critic.scores([(long, ["x"])]) == [[-float("inf")]]


def test_the_recipe_runs_from_end_to_end(tmp_path: Path) -> None:
    """On a model that has just learned to write actions; what it finds is chance, so every episode is kept."""
    base = talking_model(tmp_path / "base")
    options = {"people": 4, "turns": 2, "passages": 1, "documents": "facts", "instructions": ""}
    world, lines = Multihop(**options), []
    for number in range(4):
        for query in ("born", "city", "headquarters"):
            episode = world.begin(WorldExamples(world, 0)[number])
            first = f"Action: search {query}"
            said = [{"role": "assistant", "content": text} for text in (first, "Action: answer a")]
            lines.append({"messages": [*episode.messages, said[0], *episode.step(Message(first)).messages, said[1]]})
    (tmp_path / "forms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage = (
        f'{{name: sft, steps: 40, lr: 0.01, batch_tokens: 512, data: [{{path: "{tmp_path}/forms.jsonl"}}], '
        "evaluate_every: 0}"
    )
    align(recipe_of(tmp_path, stage, more=ADAMW), base, tmp_path / "forms", quiet=True)
    few = {0: "prompts=4 group=6 right=0 max_tokens=30 batch_tokens=256", 1: "batch_pairs=2", 2: "batch_pairs=2"}
    few[3] = "prompts=2 group=2 max_tokens=30"
    overrides = [f"align.stages.{n}.{word}" for n, words in few.items() for word in words.split()]
    overrides += [f"align.stages.{n}.{key}" for n in range(4) for key in ("steps=2", "evaluate_every=2", "evaluate=2")]
    overrides += [f"align.stages.{n}.environment={json.dumps({'name': 'multihop'} | options)}" for n in (0, 3)]
    done = align(load_recipe(RECIPE, overrides), tmp_path / "forms", tmp_path / "out", quiet=True)
    assert [stage["stage"] for stage in done["stages"]] == ["trajectories", "reward_model", "preference", "policy"]
    first = json.loads((tmp_path / "out/stages/1-trajectories/metrics.jsonl").read_text().splitlines()[0])
    assert first["pairs_made"] >= 1 and first["episodes_kept"] == 4
    steps = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["mismatch_max"] == 0 and step["reward_problems"] == 0 for step in steps)
    assert (tmp_path / "out/stages/2-reward_model/value_head.safetensors").is_file()
