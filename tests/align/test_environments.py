"""Several turns with tools: what was said is learned, what was shown is not; both are exactly what the engine saw."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import moesaic
from moesaic.align.align import align
from moesaic.align.rewards import reward_of
from moesaic.align.rewards.environment import Given
from moesaic.align.rewards.exact import Exact
from moesaic.align.rewards.process import Process
from moesaic.align.rollouts.multi_turn import generate_multi_turn, multi_turn_rollouts
from moesaic.align.rollouts.rollout import Sample, as_batch
from moesaic.align.stages import Stage
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.context import Routing
from moesaic.recipe import load_recipe
from moesaic.serve.core.engine import Counts, Engine
from moesaic.serve.core.request import Output, Request, TokenLogprob
from moesaic.serve.parsers import Call, Message
from moesaic.train.objectives.policy import Policy
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.environments.planner import Planner
from moesaic.worlds.environments.retrieval import Retrieval
from moesaic.worlds.environments.tool_use import ToolUse
from moesaic.worlds.example import Example
from moesaic.worlds.sandbox import Limits, Result, run_python
from moesaic.worlds.text_actions import WorldExamples
from moesaic.worlds.tools.python import Python
from moesaic.worlds.tools.search import Search
from tests.align.made import assert_refused, recipe_of
from tests.serve.made import talking_model
from tests.waiting import PATIENCE
from tests.worlds.solvers import SOLVERS, next_action

REWARDS = [("exact", 1.0, Exact()), ("process", 0.25, Process(by="mean"))]


@pytest.fixture(scope="module")
def model(base):
    return moesaic.load(base, threads=1, mode="invariant")


class ScriptedEngine:
    """Says what a function makes of the conversation so far, a turn per step."""

    def __init__(self, tokenizer, say: Callable[[str], str], room: int = 10_000) -> None:
        self.tokenizer, self.say, self.room = tokenizer, say, room
        self.counts = Counts()
        self.open: list[Request] = []
        self.scheduler = SimpleNamespace(requests={}, stopped=[])
        (self.stop,) = tokenizer.stop_tokens

    @property
    def working(self) -> bool:
        return bool(self.open)

    def request(self, prompt, sampling) -> Request:
        if len(prompt) >= self.room:
            raise UserError("prompt", "is too long")
        return Request(list(prompt), sampling)

    def add(self, request: Request) -> None:
        self.open.append(request)

    def abort(self, request: Request) -> None:
        request.finish_reason = request.finish_reason or "abort"

    def step(self) -> list[Output]:
        if not self.open:
            return []
        request = self.open.pop(0)
        text = self.say(self.tokenizer.decode(request.prompt, special=True))
        said = self.tokenizer.encode(text, special=False)[: request.sampling.max_tokens]
        cut = len(said) == request.sampling.max_tokens
        tokens = said if cut else [*said, self.stop]
        request.tokens += tokens
        request.logprobs = [TokenLogprob(token, -0.5) for token in tokens]
        request.versions = [3] * len(tokens)
        request.finish_reason = "length" if cut else "stop"
        return [Output(request, tokens, text, request.logprobs, request.finish_reason)]


def call(name: str, **arguments) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def played(model, environment, say, *, room: int = 10_000, group: int = 1, answer: str = "42") -> list[Sample]:
    engine = ScriptedEngine(model.tokenizer, say, room)
    example = Example(({"role": "user", "content": "What is 6 * 7?"},), answer)
    begin = multi_turn_rollouts(environment, group, {"max_tokens": 200})
    rollouts = generate_multi_turn(engine, [example], begin, REWARDS, [0])  # type: ignore[arg-type]
    return rollouts.groups[0]


def calculates(text: str) -> str:
    """Calls Python, then says what it was shown."""
    if "<|observation|>" not in text:
        return call("python", code="print(6 * 7)")
    return text.rsplit("<|observation|>\n", 1)[1].split("<|endoftext|>")[0]


def test_a_tool_is_called_for_real_and_only_what_was_said_is_learned(model):
    (sample,) = played(model, ToolUse(tools=("python",)), calculates)
    tokenizer = model.tokenizer
    said = tokenizer.decode([t for t, learn in zip(sample.tokens, sample.learned) if learn], special=True)
    shown = tokenizer.decode([t for t, learn in zip(sample.tokens, sample.learned) if not learn], special=True)
    assert said == f"{call('python', code='print(6 * 7)')}<|endoftext|>42<|endoftext|>"
    assert shown == "<|observation|>\n42<|endoftext|><|assistant|>\n"
    assert sample.judged.parts == {"exact": 1.0, "process": 1.0} and sample.judged.total == 1.25
    assert [p == -0.5 for p in sample.logprobs] == sample.learned and set(sample.versions) == {3}
    # Together they are the conversation as its template writes it.
    function = {"name": "python", "arguments": {"code": "print(6 * 7)"}}
    messages = [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "42"},
    ]
    whole = tokenizer.chat(messages, reply=False, tools=[Python().spec("python")])
    assert tokenizer.decode([*sample.prompt, *sample.tokens], special=True) == whole


def test_calls_that_go_wrong_are_shown_and_score_nothing(model, monkeypatch):
    wrong = [
        call("pyhton", code="1"),
        call("python", cod="1"),
        call("python", code="1 / 0"),
        call("python", code="while True: pass") + call("python", code="print(5)"),
    ]
    seen = []

    def say(text: str) -> str:
        turn = text.count("<|observation|>")
        seen.append(text)
        return wrong[turn] if turn < len(wrong) else "42"

    def patient(code: str, limits: Limits) -> Result:
        """Only the one that never ends has no more time than the tool gives it."""
        return run_python(code, limits=limits if "while True" in code else replace(limits, seconds=PATIENCE))

    monkeypatch.setattr("moesaic.worlds.tools.python.run_python", patient)
    (sample,) = played(model, ToolUse(tools=({"name": "python", "seconds": 1.0},), turns=9), say)
    *_, last = seen
    observations = [part.split("<|endoftext|>")[0] for part in last.split("<|observation|>\n")[1:]]
    assert observations[0] == "error: there is no pyhton; there is python"
    assert observations[1] == "error: code must be text"
    assert observations[2] == "ZeroDivisionError: division by zero"
    assert "1" in observations[3] and observations[4] == "5"
    # Two calls that could not be made; programs that failed were proper calls.
    assert sample.judged.parts == {"exact": 1.0, "process": pytest.approx((0 + 0 + 1 + 1) / 4)}


def test_an_attempt_ends_with_its_turns_its_room_or_a_turn_that_was_cut(model):
    forever = lambda text: call("python", code="print(1)")  # noqa: E731
    (sample,) = played(model, ToolUse(turns=2), forever)
    assert sum(not learn for learn in sample.learned) > 0 and sample.judged.total == pytest.approx(0.25)
    one = len(model.tokenizer.encode(forever(""), special=False)) + 1
    assert sum(sample.learned) == 2 * one

    (sample,) = played(model, ToolUse(turns=9), forever, room=len(sample.prompt) + one + 5)
    assert sample.learn is None and len(sample.tokens) == one  # nothing is left of what there was no room for

    (sample,) = played(model, ToolUse(turns=9), lambda text: "1 " * 300)
    assert len(sample.tokens) == 200 and sample.finish_reason == "length"


@dataclass(frozen=True)
class Endless(Environment):
    turns: int = 3

    def begin(self, example: Example) -> Episode:
        return Again(list(example.messages), [])


@dataclass
class Again(Episode):
    said: int = 0

    def step(self, said: Message) -> Step:
        self.said += 1
        return Step([{"role": "user", "content": f"Once more, {self.said}."}], reward=1.0)


def test_trainer_and_engine_agree_on_several_turns_to_the_bit(model):
    engine = Engine(model, cache_bytes=8 << 20)
    examples = [Example(({"role": "user", "content": f"{n} and {n}"},), "1") for n in range(3)]
    stops = frozenset(range(20, 400, 4))
    begin = multi_turn_rollouts(Endless(), 2, {"max_tokens": 12, "stop_tokens": stops, "record_routes": True})
    rollouts = generate_multi_turn(engine, examples, begin, [("environment", 1.0, Given())], [1, 2, 3])
    again = generate_multi_turn(engine, examples, begin, [("environment", 1.0, Given())], [1, 2, 3])
    samples = [sample for group in rollouts.groups for sample in group]
    assert [s.tokens for s in samples] == [s.tokens for group in again.groups for s in group]
    several = [sample for sample in samples if sample.learn is not None]
    assert len(several) >= 3 and any(sample.judged.total == 3 for sample in samples)
    batch = as_batch(samples, 0, "token", {}, {})
    loss = Policy()(model, batch, Routing())
    assert float(loss.notes["mismatch_max"]) == 0.0 and float(loss.notes["routers_differ"]) == 0.0
    assert not engine.scheduler.requests and not engine.page_pool.in_use


def test_passages_are_ranked_by_bm25(tmp_path):
    texts = ["the cat sat on the mat", "a dog and a cat", "fish swim"]
    (tmp_path / "a.txt").write_text("\n\n".join(texts[:2]))
    (tmp_path / "b.md").write_text(texts[2])
    (tmp_path / "c.png").write_bytes(b"\xff")
    search = Search(str(tmp_path))
    assert search.find("CAT mat") == [texts[0], texts[1]] and search.find("whale") == []
    scores = search._index.scores(["mat", "cat"], 1.2, 0.75)
    length = 0.25 + 0.75 * 6 / (13 / 3)
    rarity = math.log(1 + 2.5 / 1.5) + math.log(1 + 1.5 / 2.5)
    assert scores[0] == pytest.approx(rarity * 2.2 / (1 + 1.2 * length))
    assert search(query="whale") == "(nothing was found)"
    with pytest.raises(UserError, match="cannot be read"):
        Search(str(tmp_path / "none"))(query="cat")


ASKED = Example(({"role": "user", "content": "?"},), "Paris")


def test_searches_are_scored_by_what_they_bring_up(tmp_path):
    (tmp_path / "a.txt").write_text("Paris is in France.\n\nRome is in Italy.\n\nThe capital of France is Paris.")
    episode = Retrieval(path=str(tmp_path), passages=1, turns=9).begin(ASKED)

    def search(query: str) -> Step:
        return episode.step(Message(calls=[Call("search", json.dumps({"query": query}))]))

    first = search("Italy")
    assert first.score == pytest.approx(0.2) and not first.done  # new, and no more than that
    assert first.messages[0] == {"role": "tool", "content": "Rome is in Italy."}
    assert search("Italy").score == 0.0  # asked before
    assert search("capital").score == 1.0  # it holds the answer
    assert search("capital of").score == 0.0  # which had been shown
    wrong = episode.step(Message(calls=[Call("find", "{}")]))
    assert wrong.score == 0.0 and wrong.invalid == "action" and "there is search" in wrong.messages[0]["content"]
    last = episode.step(Message("It is Paris."))
    assert last.done and last.reward == last.score == 0.0  # not the answer word for word
    assert Retrieval(path=str(tmp_path), outcome="f1").begin(ASKED).step(Message("It is Paris.")).reward == 0.5


def test_a_plan_is_worth_what_the_executor_gains_by_it(base, tmp_path, monkeypatch):
    environment = Planner(executor=str(base), attempts=4, reward={"name": "exact"})
    asked = []

    def requests_for(engine, example, attempts, sampling, seed):
        asked.append(example.question)
        return [example.question] * attempts

    def complete(questions):
        """With a plan that says so three of four are right, without one every fourth."""
        right = 3 if questions[0].endswith("plan:\nadd them") else 1
        texts = ["4"] * right + ["5"] * (len(questions) - right)
        return [SimpleNamespace(text=text, tokens=[1], finish_reason="stop") for text in texts]

    environment.judged_by(reward_of)
    monkeypatch.setattr("moesaic.worlds.environments.planner.requests_for", requests_for)
    monkeypatch.setattr("moesaic.worlds.environments.planner.load", lambda path, **options: None)
    engine = SimpleNamespace(complete=complete)
    monkeypatch.setattr("moesaic.worlds.environments.planner.Engine", lambda model, **options: engine)
    example = Example(({"role": "user", "content": "2 + 2 = ?"},), "4")
    episode = environment.begin(example)
    assert episode.messages[0]["content"].endswith("2 + 2 = ?") and "plan" in episode.messages[0]["content"]
    step = episode.step(Message(" add them "))
    assert step.done and step.reward == pytest.approx(0.75 - 0.25)
    assert environment.begin(example).step(Message("guess")).reward == 0.0
    assert len(asked) == 3  # what it can do alone is found out once


@pytest.mark.parametrize("name", ["tool_use", "planner"])
def test_a_stage_runs_in_an_environment(base, tmp_path, name):
    environment = {
        "tool_use": "{name: tool_use, tools: [python], turns: 2}",
        "planner": f"{{name: planner, executor: {base}, attempts: 2, max_tokens: 4, turns: 1}}",
    }[name]
    stage = (
        '{name: policy, steps: 2, lr: 0.001, data: [{path: "builtin:chain_sum"}], prompts: 2, group: 2, max_tokens: 6, '
        f"environment: {environment}, evaluate: 2, evaluate_every: 2, advantage: group_centred, "
        "rewards: [{name: environment}, {name: repetition, n: 1, unit: characters}]}"
    )
    align(recipe_of(tmp_path, stage), base, tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["mismatch_max"] == 0 and line["reward_problems"] == 0 for line in lines)
    assert "accuracy" in lines[-1]


@pytest.mark.parametrize("name", list(SOLVERS))
def test_rollouts_in_a_world_of_the_agents_suite_get_its_reward(model, name):
    """Solved by a script that reads what it is shown, as the suite is; failed by one that does not act."""
    # tests/worlds/test_browser.py has a browser.
    world = build(Method(name, {"browser": "text"} if name in ("shop", "browse") else {}), Environment, "test")
    examples = WorldExamples(world, 0)

    def solves(text: str) -> str:
        return f"Action: {next_action(conversation(text))}"

    for say, reward in ((solves, 1.0), (lambda text: "Let me think.", 0.0)):
        engine = ScriptedEngine(model.tokenizer, say)
        begin = multi_turn_rollouts(world, 1, {"max_tokens": 200})
        asked = [examples[n] for n in range(3)]
        rollouts = generate_multi_turn(engine, asked, begin, [("environment", 1.0, Given())], [0] * 3)
        samples = [sample for group in rollouts.groups for sample in group]
        assert [sample.judged.total for sample in samples] == [reward] * 3 and not rollouts.problems
        # What the world said is not learned. A kernel that is right at once ends its episode before it says anything.
        assert all((sample.learn is None) == (name == "kernel" and reward == 1.0) for sample in samples)


def conversation(text: str) -> list[dict[str, str]]:
    """The messages that a template wrote."""
    turns = re.split(r"<\|(user|assistant)\|>\n", text)[1:]
    made = [
        {"role": role, "content": said.removesuffix("<|endoftext|>")} for role, said in zip(turns[::2], turns[1::2])
    ]
    return made[:-1]  # the last one is opened only


def test_a_stage_trains_in_a_world(tmp_path):
    """Prompts are the world's own tasks, and so is what accuracy is measured on."""
    base = talking_model(tmp_path / "base", context=4096)
    stage = (
        "{name: policy, steps: 2, lr: 0.001, prompts: 2, group: 2, max_tokens: 6, evaluate: 2, evaluate_every: 2, "
        "environment: {name: sql, turns: 3, mistakes: 2}, "
        "rewards: [{name: environment}, {name: repetition, n: 1, unit: characters}]}"
    )
    align(recipe_of(tmp_path, stage), base, tmp_path / "out", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 and all(line["mismatch_max"] == 0 and line["reward_problems"] == 0 for line in lines)
    assert lines[-1]["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ('data: [{path: "builtin:sums"}], environment: cards', "tasks of its own"),
        ("environment: tool_use", "data names no source"),
        ("environment: cards", "task can judge nothing"),
        ("environment: {name: cards, mistakes: 0}, rewards: [{name: environment}]", "at least 1"),
    ],
)
def test_data_or_a_world_not_both(base, tmp_path, options, message):
    assert_refused(tmp_path, base, f"{{name: policy, {options}}}", message)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ("nothing", "no such method"),
        ("{name: tool_use, tools: [nothing]}", "no such method"),
        ("{name: tool_use, tools: [{name: python, second: 1}]}", "seconds"),
        ("retrieval", "path of a text"),
        ("planner", "executor"),
    ],
)
def test_a_bad_environment_is_refused(base, tmp_path, environment, message):
    stage = f'{{name: policy, data: [{{path: "builtin:chain_sum"}}], environment: {environment}}}'
    assert_refused(tmp_path, base, stage, message)


@pytest.mark.parametrize("name", ["align-async", "align-tools", "align-planner"])
def test_the_recipes_are_sound(name):
    recipe = load_recipe(Path("recipes") / f"{name}.yaml", [])
    for number in range(len(recipe.align.stages)):
        stage = recipe.build(f"align.stages.{number}", Stage)
        if hasattr(stage, "world"):
            stage.world()
