"""Multi-turn rollouts: what the model said and what an environment showed it, as one sequence of tokens.

The tokens of a turn are kept as they were sampled; only what comes between turns is made from the chat template. So the
sequence that is learned from is, token for token, what the engine computed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moesaic.align.rewards import Judged, Reward, reward_of
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.pool import Rollout, RolloutPool, StartGroup
from moesaic.align.rollouts.rollout import Rollouts, Sample, sample_of
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.untrusted_content import Covered
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.parsers import Parser, detect
from moesaic.worlds.completions import SPEAKERS, prompt_tokens, seed_of
from moesaic.worlds.environments import Environment
from moesaic.worlds.example import Example
from moesaic.worlds.judges import Answer

MARK = "\ue000\ue002"  # a turn in a conversation that is rendered only to see what follows it; nobody can forge it


def between(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Any],
    shown: Sequence[dict[str, Any]],
    ended: str = "",
) -> list[int]:
    """The tokens from the end of one assistant turn to the opening of the next, its end mark included unless the turn
    `ended` with it. What is shown is data: it holds no special token, whatever it spells out."""
    options = {"tools": list(tools)} if tools else {}
    covered = Covered(tokenizer, [*messages, *shown], trusted=SPEAKERS)
    before, after = covered.messages[: len(messages)], covered.messages[len(messages) :]
    text = tokenizer.chat([*before, {"role": "assistant", "content": MARK}, *after], reply=True, **options)
    _, found, rest = text.rpartition(MARK)
    if not found:
        raise UserError(tokenizer.place, "the chat template leaves a turn out once others follow", "Mend it.")
    return covered.encode(rest.removeprefix(ended))


class MultiTurnRollout(Rollout):
    """One attempt: a request for each turn, each beginning with all that came before."""

    def __init__(
        self,
        engine: Engine,
        parser: Parser,
        environment: Environment,
        example: Example,
        sampling: Mapping[str, Any],
        seed: int,
    ) -> None:
        assert engine.tokenizer is not None
        self.engine, self.tokenizer, self.parser = engine, engine.tokenizer, parser
        self.environment, self.sampling, self.seed = environment, sampling, seed
        self._busy, self._closed = threading.Lock(), False
        self.episode = environment.begin(example)
        self.messages = list(self.episode.messages)
        with example.at_its_place():
            self.prompt = prompt_tokens(self.tokenizer, self.messages, self.episode.tools or None)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.learn: list[bool] = []
        self.scores: list[float] = []
        self.reward = 0.0
        self.turn = 0
        self.said = ""  # in the last turn, calls and thoughts left out
        try:
            super().__init__(example, self._request())
        except BaseException:
            self.close()
            raise
        self.turns = True

    def close(self) -> None:
        """Give the world back, once; a step that is under way is waited for."""
        with self._busy:
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.episode.close()

    def _request(self) -> Request:
        markers = self.parser.markers(self.tokenizer, calls=bool(self.episode.tools))
        sampling = Sampling(**self.sampling, seed=seed_of(self.seed, self.turn), markers=markers)
        return self.engine.request([*self.prompt, *self.tokens], sampling)

    def next_turn(self) -> Request | None:
        with self._busy:
            return None if self._closed else self._next_turn()

    def _next_turn(self) -> Request | None:
        request = self.request
        written = request.tokens[len(request.prompt) :]
        self._add(written, [entry.logprob for entry in request.logprobs], request.versions, True)
        opened = self.tokenizer.decode(request.prompt[-32:], special=True)
        said = self.parser.parse(self.text, self.episode.tools, opened)
        self.said = said.content
        step = self.episode.step(said)
        self.reward += step.reward
        if step.score is not None:
            self.scores.append(step.score)
        self.turn += 1
        if step.done or request.finish_reason != "stop" or self.turn >= self.environment.turns:
            self._close()
            return None
        ended = self.tokenizer.decode(written[-1:], special=True) if written else ""  # the end mark, if it was said
        shown = between(self.tokenizer, self.messages, self.episode.tools, step.messages, ended)
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in said.calls]
        turn = {"role": "assistant", "content": said.content} | ({"tool_calls": calls} if calls else {})
        self.messages += [turn, *step.messages]
        try:
            last = self.versions[-1] if self.versions else 0
            self._add(shown, [0.0] * len(shown), [last] * len(shown), False)
            following = self._request()
        except UserError:  # the context holds no further turn
            self._drop(len(shown))
            self._close()
            return None
        self.request, self.text = following, ""
        return following

    def answer(self) -> Answer:
        example, reason = self.example, self.request.finish_reason or "abort"
        facts = example.facts | {"environment": self.reward} | ({"steps": self.scores} if self.scores else {})
        spoken = sum(self.learn)
        messages = tuple(self.messages)
        return Answer(example.question, self.said, spoken, reason, example.truth, example.task, facts, messages)

    def sample(self, judged: Judged) -> Sample:
        last = sample_of(self.request, self.text, judged)
        if not any(self.learn):
            return last
        return replace(
            last,
            prompt=self.prompt,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            learn=None if all(self.learn) else self.learn,
        )

    def _add(self, tokens: list[int], logprobs: list[float], versions: list[int], learn: bool) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.versions += versions
        self.learn += [learn] * len(tokens)

    def _drop(self, count: int) -> None:
        for kept in (self.tokens, self.logprobs, self.versions, self.learn):
            del kept[len(kept) - count :]


def open_environment(method: Method) -> Environment:
    """The environment that a stage names."""
    environment = build(method, Environment, "align.stages: environment")
    environment.judged_by(reward_of)
    return environment


def multi_turn_rollouts(environment: Environment, group: int, sampling: Mapping[str, Any]) -> StartGroup:
    def start_group(engine: Engine, example: Example, seed: int) -> list[Rollout]:
        assert engine.tokenizer is not None
        parser = detect(engine.tokenizer.chat_template)
        rollouts: list[Rollout] = []
        try:
            for number in range(group):
                own = seed_of(seed, number)
                rollouts.append(MultiTurnRollout(engine, parser, environment, example, sampling, own))
        except BaseException:
            for rollout in rollouts:
                rollout.close()
            raise
        return rollouts

    return start_group


def generate_multi_turn(
    engine: Engine,
    examples: Sequence[Example],
    start_group: StartGroup,
    rewards: Sequence[tuple[str, float, Reward]],
    seeds: Sequence[int],
) -> Rollouts:
    """As `rollout.generate`, in an environment. What fails, fails the run: there is nobody else to go on."""
    before = EngineWork.of(engine)
    pool = RolloutPool(engine, rewards)
    found: dict[int, list[Sample]] = {}
    try:
        for number, (example, seed) in enumerate(zip(examples, seeds, strict=True)):
            pool.add(number, start_group(engine, example, seed))
        while pool.groups:
            for number, result in pool.step():
                if isinstance(result, Exception):
                    raise result
                found[number] = result
            if not engine.working:
                pool.changed.wait(1.0)
    finally:
        pool.close()
    work = EngineWork.of(engine) - before
    groups = [found[number] for number in range(len(examples))]
    problems = [problem for group in groups for sample in group for problem in sample.judged.problems]
    return Rollouts(groups, work, problems)
