"""A model as an agent, over several turns, in five worlds (AgentBench, Liu et al.): how many of its tasks it completes.

    moesaic evaluate out/aligned --suite agents examples=20
    moesaic evaluate http://127.0.0.1:8000/v1 --suite agents environments=sql,graph turns=6 --out evaluation

Tasks are made from a seed, the same for every model, and nothing outside this machine is needed. All episodes go on
together, turn by turn. AgentBench weighs its environments by what models reached on average; here the score is the
plain mean over them. How an episode ended is told in AgentBench's classes: completed (rightly or wrongly), context
limit, invalid format, invalid action, turn limit. A mistake in form or an action that the world refuses is answered
with what is wrong; so many of them in a row (`mistakes`) end the episode.
"""

from __future__ import annotations

import collections
import random
from dataclasses import dataclass, field
from typing import Any

from moesaic.evaluate.backends import Said
from moesaic.evaluate.environments import (
    LONGEST,
    Environment,
    Episode,
    Finished,
    Invalid,
    Malformed,
    action_in,
)
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.questions import speaker_of
from moesaic.evaluate.suites import Asked, Suite
from moesaic.methods import Method, build, known
from moesaic.model.transformer import Model

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
    mistakes: int  # in a row, at most
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn: int = 0
    tokens: int = 0
    wrong: int = 0  # mistakes in a row so far
    outcome: str | None = None
    score: float = 0.0

    def hear(self, said: Said) -> None:
        """Take an answer, and let the world go on, or end."""
        self.turn += 1
        self.tokens += said.tokens
        text = said.text.encode("utf-8", "replace").decode().strip()  # a server may send half a character
        self.messages.append({"role": "assistant", "content": text[:LONGEST]})
        if said.no_room:
            return self._end(CONTEXT)
        try:
            seen = self.episode.act(action_in(text))
            self.wrong = 0
        except (Malformed, Invalid) as error:
            seen, self.wrong = str(error), self.wrong + 1
            if self.wrong >= self.mistakes:
                self._end(FORMAT if isinstance(error, Malformed) else ACTION)
        if isinstance(seen, Finished):
            self.score = seen.score
            self._end(COMPLETED)
            seen = seen.observation
        if self.outcome is None and self.turn >= self.turns:
            self._end(TURNS)
        self.messages.append({"role": "user", "content": seen})

    def _end(self, outcome: str) -> None:
        self.outcome = outcome
        self.episode.close()

    def transcript(self) -> str:
        told = []
        for message in self.messages[1:]:
            text = str(message["content"])
            told.append(f"{'>' if message['role'] == 'assistant' else ' '} {text[:SHOWN]}")
        return "\n".join([*told, f"[{self.outcome}, score {self.score:g}]"])


@dataclass(frozen=True)
class Agents(Suite):
    environments: str = "shell,sql,graph,cards,house"
    examples: int = 10  # episodes in each environment
    turns: int = 0  # of the model in an episode, at most; 0: what the environment holds to be enough
    mistakes: int = 3  # in a row, that end an episode
    max_tokens: int = 256  # of a turn
    seed: int = 0

    needs_model = False
    takes_kv_policy = True

    def __post_init__(self) -> None:
        if self.examples < 1 or self.max_tokens < 1 or self.mistakes < 1 or self.turns < 0:
            raise ValueError("examples, max_tokens and mistakes must be at least 1, and turns at least 0")
        names = self.environments.split(",")
        for name in names:
            if name not in known(Environment):
                raise ValueError(f'environments: there is no "{name}"; known: {", ".join(known(Environment))}')
        if len(set(names)) < len(names):
            raise ValueError("environments: the same one is named twice")

    def run(self, model: Model | None, asked: Asked) -> dict[str, Any]:
        speaker, attempts = speaker_of(model, asked), self._attempts()
        try:
            while going := [attempt for attempt in attempts if attempt.outcome is None]:
                answers: dict[int, Said] = {}
                speaker.answer([attempt.messages for attempt in going], self.max_tokens, answers.__setitem__)
                # Worlds go on when all have answered, and in order: an episode must not depend on who was quick.
                for number, attempt in enumerate(going):
                    attempt.hear(answers[number])
                    asked.progress(sum(attempt.outcome is not None for attempt in attempts), len(attempts))
        finally:
            for attempt in attempts:
                if attempt.outcome is None:  # interrupted
                    attempt.episode.close()
        return self._told(attempts)

    def _attempts(self) -> list[Attempt]:
        found = []
        for name in self.environments.split(","):
            environment: Environment = build(Method(name), Environment, "environments")  # type: ignore[type-abstract]
            for number in range(self.examples):
                episode = environment.episode(random.Random(f"{name} {self.seed} {number}"), number)
                attempt = Attempt(name, episode, self.turns or environment.turns, self.mistakes)
                attempt.messages.append({"role": "user", "content": episode.open()})
                found.append(attempt)
        return found

    def _told(self, attempts: list[Attempt]) -> dict[str, Any]:
        by_name: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            by_name.setdefault(attempt.environment, []).append(attempt)
        told = _share("score", attempts)  # as many of each, so that this is the mean over environments too
        for name, own in by_name.items():
            told |= _share(name, own)
        told |= {outcome.replace(" ", "_"): sum(a.outcome == outcome for a in attempts) for outcome in OUTCOMES}
        told["examples"] = len(attempts)
        told["turns"] = sum(attempt.turn for attempt in attempts) / len(attempts)
        told["answer_tokens"] = sum(attempt.tokens for attempt in attempts) / len(attempts)
        told["outcomes"] = {
            name: dict(collections.Counter(str(attempt.outcome) for attempt in own)) for name, own in by_name.items()
        }
        told["samples"] = [
            {
                "environment": name,
                "question": own[0].messages[0]["content"],
                "answer": own[0].transcript(),
                "right": own[0].score >= 1.0,
            }
            for name, own in by_name.items()
        ]
        return told


def _share(name: str, attempts: list[Attempt]) -> dict[str, Any]:
    total = sum(attempt.score for attempt in attempts)
    low, high = wilson(total, len(attempts))
    return {name: total / len(attempts), f"{name}_low": low, f"{name}_high": high}
