"""Episodes of a world played by somebody who does not learn from them: a teacher, or the executor of a plan.

    play(EnginePlayer(engine, {"max_tokens": 64}, seed=0), world, examples)
    play(ServerPlayer("http://127.0.0.1:8000/v1", model="large"), world, examples)

All episodes go on together, turn by turn. An episode does not depend on which others are played beside it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from moesaic.errors import UserError
from moesaic.serve.chat_client import ChatClient, Reply
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.parsers import Message
from moesaic.worlds.completions import prompt_tokens, seed_of
from moesaic.worlds.environments import Environment, Episode
from moesaic.worlds.example import Example

Conversation = Sequence[Mapping[str, Any]]


class Player(Protocol):
    def say(self, asked: Sequence[tuple[int, Conversation]]) -> list[str | None]:
        """The next turn in each conversation, with a number that is its own; None where there can be no further one."""


@dataclass
class Played:
    """An episode that is over."""

    messages: list[dict[str, Any]]  # up to the last thing that was said
    reward: float
    invalid: int  # turns that changed nothing
    turns: int


@dataclass
class _Going:
    number: int
    episode: Episode
    messages: list[dict[str, Any]]
    left: int  # turns
    reward: float = 0.0
    invalid: int = 0
    over: bool = False

    def hear(self, text: str | None) -> None:
        if text is None:
            self.over = True
            return
        self.messages.append({"role": "assistant", "content": text})
        step = self.episode.step(Message(text))
        self.reward += step.reward
        self.invalid += step.invalid is not None
        self.left -= 1
        self.over = step.done or self.left <= 0
        if not self.over:
            self.messages += step.messages

    def played(self) -> Played:
        said = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        return Played(self.messages[: said[-1] + 1 if said else 0], self.reward, self.invalid, len(said))


def play(
    player: Player, environment: Environment, examples: Sequence[Example], told: Sequence[str] = (), first: int = 0
) -> list[Played]:
    """An episode of each example. `told` is what is said to the player at the end of each opening (a plan, say), and
    `first` the number of the first one, where they are some of many."""
    going: list[_Going] = []
    try:
        for number, example in enumerate(examples):
            episode = environment.begin(example)
            going.append(_Going(first + number, episode, list(episode.messages), environment.turns))
            if told:
                *before, last = map(dict, episode.messages)
                going[-1].messages = [*before, last | {"content": f"{last.get('content', '')}{told[number]}"}]
        while left := [one for one in going if not one.over]:
            turns = [(seed_of(one.number, one.left), one.messages) for one in left]
            for one, text in zip(left, player.say(turns), strict=True):
                one.hear(text)
    finally:
        for one in going:
            one.episode.close()
    return [one.played() for one in going]


class EnginePlayer:
    """A model here. Turns that are asked for together are computed together."""

    def __init__(self, engine: Engine, sampling: Mapping[str, Any], seed: int = 0) -> None:
        self.engine, self.sampling, self.seed = engine, sampling, seed

    def say(self, asked: Sequence[tuple[int, Conversation]]) -> list[str | None]:
        tokenizer = self.engine.tokenizer
        assert tokenizer is not None
        found: list[str | None] = [None] * len(asked)
        requests = {}
        for place, (number, messages) in enumerate(asked):
            sampling = Sampling(**self.sampling, seed=seed_of(self.seed, number))
            prompt = prompt_tokens(tokenizer, messages)
            try:
                requests[place] = self.engine.request(prompt, sampling)
            except UserError:  # the context holds no further turn
                continue
        for place, done in zip(requests, self.engine.complete(list(requests.values())), strict=True):
            found[place] = done.text
        return found


class ServerPlayer:
    """A model behind any OpenAI-compatible URL; `key_variable` is the name of the variable that holds its key."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        key_variable: str | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
        at_once: int = 8,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url begins with http:// or https://, not {url!r}")
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"the environment variable {key_variable} is not set")
        key = os.environ.get(key_variable) if key_variable else None
        self.fields = {"max_tokens": max_tokens, "temperature": temperature}
        self.client = ChatClient(url, model, key, at_once, remedy="What was played is kept; the same command goes on.")

    def say(self, asked: Sequence[tuple[int, Conversation]]) -> list[str | None]:
        found: list[str | None] = [None] * len(asked)

        def tell(place: int, reply: Reply) -> None:
            found[place] = None if reply.too_long else reply.text

        self.client.ask_all([(messages, self.fields) for _, messages in asked], tell)
        return found
