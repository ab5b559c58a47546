"""Process data by branching (RAG-Gym's trajectory sampling): at every state of an episode several next actions are
sampled and scored, each in a copy of the episode, and the episode goes on with the best.

Files in the run's `trajectories` folder, written once, each whole or not at all:

    samples.jsonl   every action at every state, with its score
    kept.jsonl      episodes that ended well, as an SFT stage reads them
    pairs.jsonl     a better and a worse action at the same state, as preference and reward_model stages read them

A copy of an episode is a new one in which the same turns are taken again, so any deterministic environment will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic import atomic
from moesaic.align.examples import Mixture
from moesaic.align.rollouts.rejection import write_lines
from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.parsers import Message, Parser, detect
from moesaic.worlds.completions import prompt_tokens, seed_of
from moesaic.worlds.environments import Environment, Episode, Step
from moesaic.worlds.example import Example

AT_ONCE = 16  # episodes

Score = Callable[[Step], float]


def step_score(step: Step) -> float:
    """What an action is worth by itself: its process reward, or, at the end, what the environment gave."""
    return step.score if step.score is not None else step.reward if step.done else 0.0


@dataclass(frozen=True)
class Candidate:
    """One of the actions that were sampled at a state."""

    text: str  # as it was written, calls included
    said: Message
    step: Step
    score: float

    def message(self) -> dict[str, Any]:
        calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in self.said.calls]
        return {"role": "assistant", "content": self.said.content} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True)
class State:
    """What was said before, and the different actions that were sampled there, the best first."""

    messages: tuple[dict[str, Any], ...]
    candidates: tuple[Candidate, ...]

    def pairs(self, most: int, margin: float) -> Iterator[tuple[Candidate, Candidate]]:
        """The best against others that are worse by more than `margin`, the worst first."""
        best, *others = self.candidates
        worse = [other for other in reversed(others) if best.score - other.score > margin]
        for other in worse[:most]:
            yield best, other


@dataclass
class Trajectory:
    """An episode that always takes the best of its actions."""

    environment: Environment
    example: Example
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    reward: float = 0.0
    over: bool = False

    def __post_init__(self) -> None:
        episode = self._episode()
        self.messages, self.tools = list(episode.messages), list(episode.tools)
        episode.close()

    def _episode(self) -> Episode:
        """The episode as it stands, once more."""
        episode = self.environment.begin(self.example)
        try:
            for said in self.said:
                episode.step(said)
        except BaseException:
            episode.close()
            raise
        return episode

    def attempt(self, text: str, said: Message, score: Score, whole: bool) -> Candidate:
        """What would become of an action; one that was cut off is worth nothing."""
        episode = self._episode()
        try:
            step = episode.step(said)
        finally:
            episode.close()
        return Candidate(text, said, step, score(step) if whole else 0.0)

    def go_on(self, candidates: Sequence[Candidate]) -> None:
        # Sorting is stable: of equals the one that was sampled first. What says the same counts once.
        best_first = {one.text: one for one in sorted(candidates, key=lambda one: -one.score)}
        state = State(tuple(self.messages), tuple(sorted(best_first.values(), key=lambda one: -one.score)))
        self.states.append(state)
        best = state.candidates[0]
        self.said.append(best.said)
        self.messages += [best.message(), *best.step.messages]
        self.reward += best.step.reward
        self.over = best.step.done or len(self.said) >= self.environment.turns

    def conversation(self) -> list[dict[str, Any]]:
        """Up to the last thing that was said."""
        last = max(number for number, message in enumerate(self.messages) if message["role"] == "assistant")
        return self.messages[: last + 1]


def branch(
    engine: Engine,
    environment: Environment,
    examples: Sequence[Example],
    group: int,
    sampling: Mapping[str, Any],
    seed: int,
    score: Score = step_score,
) -> list[Trajectory]:
    """A trajectory of each example, `group` actions sampled at each of its states."""
    assert engine.tokenizer is not None
    parser = detect(engine.tokenizer.chat_template)
    trajectories = [Trajectory(environment, example) for example in examples]
    while going := [(n, one) for n, one in enumerate(trajectories) if not one.over]:
        asked = []
        for number, one in going:
            try:
                requests = [
                    engine.request(*_request(engine, parser, one, sampling, seed_of(seed, number, len(one.said), k)))
                    for k in range(group)
                ]
            except UserError:  # the context holds no further turn
                one.over = True
                continue
            asked.append((one, requests))
        completions = iter(engine.complete([request for _, requests in asked for request in requests]))
        for one, requests in asked:
            candidates = []
            for request in requests:
                done = next(completions)
                opened = engine.tokenizer.decode(request.prompt[-32:], special=True)
                said = parser.parse(done.text, one.tools, opened)
                candidates.append(one.attempt(done.text, said, score, done.finish_reason == "stop"))
            one.go_on(candidates)
    return trajectories


def _request(
    engine: Engine, parser: Parser, one: Trajectory, sampling: Mapping[str, Any], seed: int
) -> tuple[list[int], Sampling]:
    assert engine.tokenizer is not None
    prompt = prompt_tokens(engine.tokenizer, one.messages, one.tools or None)
    markers = parser.markers(engine.tokenizer, calls=bool(one.tools))
    return prompt, Sampling(**sampling, seed=seed, markers=markers)


@dataclass(frozen=True)
class BranchRule:
    """Which episodes are kept, and which pairs are made."""

    right: float  # an episode that is kept has at least this reward
    pairs: int  # of a state, at most
    margin: float  # a pair's scores are more than this apart


def collect_steps(
    engine: Engine,
    environment: Environment,
    examples: Mixture,
    prompts: int,
    group: int,
    sampling: Mapping[str, Any],
    rule: BranchRule,
    seed: int,
    folder: Path,
    key: str,
) -> dict[str, float]:
    """Makes the files, unless those of the same `key` are there. Returns what came of it."""
    done = folder / "summary.json"
    if done.is_file() and (summary := read_json(done)).get("key") == key:
        return dict(summary["notes"])
    folder.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[dict[str, Any]]] = {"samples": [], "kept": [], "pairs": []}
    rewards: list[float] = []
    scores: list[float] = []
    states = 0
    for start in range(0, prompts, AT_ONCE):
        batch = [next(examples) for _ in range(min(AT_ONCE, prompts - start))]
        for one in branch(engine, environment, batch, group, sampling, seed_of(seed, start)):
            rewards.append(one.reward)
            states += len(one.states)
            scores += [candidate.score for state in one.states for candidate in state.candidates]
            for name, found in _lines(one, rule).items():
                lines[name] += found
    if not lines["kept"]:
        problem = f"none of {prompts} episodes had a reward of {rule.right:g}"
        raise UserError("align.stages: trajectories", problem, "Raise prompts or group, or lower right.")
    for name, found in lines.items():
        write_lines(folder / f"{name}.jsonl", found)
    notes = {
        "sampled_reward": sum(rewards) / len(rewards),
        "step_score": sum(scores) / len(scores),
        "states": float(states),
        "episodes_kept": float(len(lines["kept"])),
        "pairs_made": float(len(lines["pairs"])),
    }
    atomic.write_json(done, {"key": key, "notes": notes}, indent=1)
    return notes


def _lines(one: Trajectory, rule: BranchRule) -> dict[str, list[dict[str, Any]]]:
    tools = {"tools": one.tools} if one.tools else {}
    found: dict[str, list[dict[str, Any]]] = {"samples": [], "kept": [], "pairs": []}
    for state in one.states:
        base = {"messages": list(state.messages)} | tools
        scored = [{"text": c.text, "score": c.score, "invalid": c.step.invalid} for c in state.candidates]
        found["samples"].append(base | {"actions": scored})
        for chosen, rejected in state.pairs(rule.pairs, rule.margin):
            gap = {"gap": chosen.score - rejected.score}
            if rejected.text.strip():
                found["pairs"].append(base | {"chosen": [chosen.message()], "rejected": [rejected.message()]} | gap)
    if one.reward >= rule.right and one.states:
        found["kept"].append({"messages": one.conversation()} | tools)
    return found
