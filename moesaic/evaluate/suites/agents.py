"""A model as an agent, over several turns, in AgentBench's eight kinds of worlds (Liu et al.): what it completes.

    moesaic evaluate out/aligned --suite agents examples=20
    moesaic evaluate http://127.0.0.1:8000/v1 --suite agents environments=sql,graph turns=6 --out evaluation
    moesaic evaluate out/aligned --suite agents environments=house,shop settings='{house: {size: full}}'
    moesaic evaluate out/aligned --suite agents environments=multihop critic=out/critic candidates=8
    moesaic evaluate out/aligned --suite agents environments=house planner=out/planner

Tasks are made from a seed, the same for every model, and nothing outside this machine is needed. All episodes go on
together, turn by turn. AgentBench weighs its environments by what models reached on average; here the score is the
plain mean over them. How an episode ended is told in AgentBench's classes: completed (rightly or wrongly), context
limit, invalid format, invalid action, turn limit. A mistake in form or an action that the world refuses is answered
with what is wrong; so many of them in a row (`mistakes`) end the episode. With a `critic`, a reward model's directory,
`candidates` turns are sampled at each state, and the one it holds to be best is taken (RAG-Gym). With a `planner`, the
directory that a policy stage made in the environment `planner`, a plan of its own is put below each task (EAGLET).
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

from moesaic.errors import UserError
from moesaic.evaluate.backends import Answer, Backend
from moesaic.evaluate.best_of_n import BestOfNBackend
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.questions import backend_for
from moesaic.evaluate.suites import Suite, SuiteContext
from moesaic.methods import Method, build
from moesaic.model.directory import load
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.parsers import Message
from moesaic.worlds.critic import Critic
from moesaic.worlds.environments import Environment, Episode
from moesaic.worlds.environments.planner import HINT, REQUEST, told
from moesaic.worlds.playing import EnginePlayer
from moesaic.worlds.text_actions import MAX_CHARACTERS, World, known_worlds

COMPLETED, CONTEXT, FORMAT, ACTION, TURNS = OUTCOMES = (
    "completed",
    "context limit",
    "invalid format",
    "invalid action",
    "turn limit",
)
SHOWN = 600  # characters of a turn in a transcript


@dataclass
class Attempt:
    """One episode with one model."""

    environment: str
    episode: Episode
    turns: int  # at most
    messages: list[dict[str, Any]]
    turn: int = 0
    tokens: int = 0
    outcome: str | None = None
    score: float = 0.0

    def hear(self, answer: Answer) -> None:
        """Take a turn of the model, and let the world go on, or end."""
        self.turn += 1
        self.tokens += answer.tokens
        text = answer.text.encode("utf-8", "replace").decode().strip()  # a server may send half a character
        self.messages.append({"role": "assistant", "content": text[:MAX_CHARACTERS]})
        if answer.out_of_context:
            return self._end(CONTEXT)
        step = self.episode.step(Message(text))
        if step.done:
            self.score = step.reward
            self._end({"format": FORMAT, "action": ACTION, None: COMPLETED}[step.invalid])
        elif self.turn >= self.turns:
            self._end(TURNS)
        self.messages += step.messages

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.episode.close()

    def transcript(self) -> str:
        metrics = []
        for message in self.messages[1:]:
            text = str(message["content"])
            metrics.append(f"{'>' if message['role'] == 'assistant' else ' '} {text[:SHOWN]}")
        return "\n".join([*metrics, f"[{self.outcome}, score {self.score:g}]"])


@dataclass(frozen=True)
class Agents(Suite):
    environments: str = "shell,sql,graph,cards,lateral,house,shop,browse"
    examples: int = 10  # episodes in each environment
    turns: int = 0  # of the model in an episode, at most; 0: what the environment holds to be enough
    mistakes: int = 3  # in a row, that end an episode
    max_tokens: int = 256  # of a turn
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)  # options of all environments, or under a name, of that one
    critic: str = ""  # a directory that a reward_model stage made
    candidates: int = 8  # turns that a critic chooses among
    planner: str = ""  # a model directory
    plan_tokens: int = 64  # of a plan

    needs_model = False
    takes_kv_policy = True

    def __post_init__(self) -> None:
        if min(self.examples, self.max_tokens, self.mistakes, self.candidates, self.plan_tokens) < 1 or self.turns < 0:
            raise ValueError(
                "examples, max_tokens, mistakes, candidates and plan_tokens must be at least 1, and turns at least 0"
            )
        names, worlds = self.environments.split(","), known_worlds()
        for name in names:
            if name not in worlds:
                raise ValueError(f'environments: there is no "{name}"; known: {", ".join(worlds)}')
        for name, options in self.settings.items():
            if name in worlds and (name not in names or not isinstance(options, dict)):
                raise ValueError(
                    f"settings: {name} is to be one of the environments, with its options as {{key: value}}"
                )
        if len(set(names)) < len(names):
            raise ValueError("environments: the same one is named twice")

    def run(self, model: Model | None, context: SuiteContext) -> dict[str, Any]:
        attempts = self._attempts()
        if self.planner:
            self._plan(attempts)
        backend = self._chosen(model) if self.critic else backend_for(model, context)
        try:
            while going := [attempt for attempt in attempts if attempt.outcome is None]:
                answers: dict[int, Answer] = {}
                backend.answer([attempt.messages for attempt in going], self.max_tokens, answers.__setitem__)
                # Worlds go on when all have answered, and in order: an episode must not depend on who was quick.
                for number, attempt in enumerate(going):
                    attempt.hear(answers[number])
                    context.progress(sum(attempt.outcome is not None for attempt in attempts), len(attempts))
        finally:
            for attempt in attempts:
                if attempt.outcome is None:  # interrupted
                    attempt.episode.close()
        return self._told(attempts)

    def _plan(self, attempts: list[Attempt]) -> None:
        engine = Engine(load(self.planner), seed=0)
        player = EnginePlayer(engine, {"max_tokens": self.plan_tokens, "temperature": 0.0})
        plans = player.say([(n, told(one.messages, before=REQUEST)) for n, one in enumerate(attempts)])
        for one, plan in zip(attempts, plans, strict=True):
            one.messages = told(one.messages, after=f"{HINT}{(plan or '').strip()}")

    def _chosen(self, model: Model | None) -> Backend:
        if model is None:
            raise UserError("critic", "chooses among what an engine samples here", "Name a model's directory.")
        return BestOfNBackend(model, Critic.open(self.critic), self.candidates, self.seed)

    def _attempts(self) -> list[Attempt]:
        found = []
        own, names = self.settings, known_worlds()
        for name in self.environments.split(","):
            options = {"mistakes": self.mistakes} | ({"turns": self.turns} if self.turns else {})
            options |= {key: value for key, value in own.items() if key not in names} | own.get(name, {})
            world = build(Method(name, options), Environment, "environments")
            assert isinstance(world, World)
            for number in range(self.examples):
                episode = world.begin(world.example(number, self.seed))
                found.append(Attempt(name, episode, world.turns, list(episode.messages)))
        return found

    def _told(self, attempts: list[Attempt]) -> dict[str, Any]:
        by_name: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_name.setdefault(attempt.environment, []).append(attempt)
        metrics = _share("score", attempts)  # as many of each, so that this is the mean over environments too
        for name, own in by_name.items():
            metrics |= _share(name, own)
        metrics |= {outcome.replace(" ", "_"): sum(a.outcome == outcome for a in attempts) for outcome in OUTCOMES}
        metrics["examples"] = len(attempts)
        metrics["turns"] = sum(attempt.turn for attempt in attempts) / len(attempts)
        metrics["answer_tokens"] = sum(attempt.tokens for attempt in attempts) / len(attempts)
        metrics["outcomes"] = {
            name: dict(collections.Counter(str(attempt.outcome) for attempt in own)) for name, own in by_name.items()
        }
        metrics["samples"] = [
            {
                "environment": name,
                "question": own[0].messages[0]["content"],
                "answer": own[0].transcript(),
                "right": own[0].score >= 1.0,
            }
            for name, own in by_name.items()
        ]
        return metrics


def _share(name: str, attempts: list[Attempt]) -> dict[str, Any]:
    total = sum(attempt.score for attempt in attempts)
    low, high = wilson(total, len(attempts))
    return {name: total / len(attempts), f"{name}_low": low, f"{name}_high": high}
