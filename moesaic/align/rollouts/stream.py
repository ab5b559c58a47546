"""What a policy learns from: every batch is answers of the model it is given, sampled when it is asked for.

One set of rollouts serves `updates` steps. DAPO's dynamic sampling asks on while all answers to a question are worth
the same, because such a question teaches nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from moesaic.align.advantages import ADVANTAGES
from moesaic.align.examples import Mixture, Place
from moesaic.align.rewards import Reward
from moesaic.align.rollouts.multi_turn import Begin, play
from moesaic.align.rollouts.rollout import Rolled, Sample, as_batch, roll
from moesaic.align.selection import Selector
from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import seed_of


@dataclass(frozen=True)
class RolloutSettings:
    prompts: int
    group: int
    updates: int
    advantage: str
    level: str
    dynamic: int  # most rounds of asking for one set of rollouts
    wishes: Mapping[str, Any]  # max_tokens, temperature, ...
    seed: int
    began: bool = False  # whether the trainer's own log-probabilities before the first update are kept
    replay: bool = False  # and whether they are of the engine's routes


@dataclass(kw_only=True)
class PolicyStream:
    """Groups of answers, however they are come by, to batches."""

    examples: Mixture
    settings: RolloutSettings
    selector: Selector
    reference: Model | None = None
    iteration: int = 0
    version: int = 0  # of the weights: how many times rollouts were asked of them
    pending: list[list[Sample]] = field(default_factory=list)  # of the present rollouts, not yet learned from
    notes: dict[str, float] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)  # a few answers with their rewards, for whoever reads the log
    warnings: list[str] = field(default_factory=list)  # of the present rollouts
    explained: set[str] = field(default_factory=set)  # rewards whose failing was told

    @property
    def position(self) -> dict[str, Any]:
        return {
            "selection": self.selector.state(),
            "iteration": self.iteration,
            "pending": [[sample.plain() for sample in samples] for samples in self.pending],
            "version": self.version,
        }

    def from_position(self, position: Mapping[str, Any] | None) -> Self:
        if position is None:
            return self
        self.selector.restore(position["selection"])
        pending = [[Sample.from_plain(sample) for sample in samples] for samples in position["pending"]]
        return replace(self, iteration=position["iteration"], version=position["version"], pending=pending)

    def skip(self, past: int | Mapping[str, Any]) -> Self:
        """A rewound run asks new questions."""
        assert isinstance(past, Mapping)
        return self.from_position(dict(past) | {"pending": []})

    def __next__(self) -> Batch:
        fresh = not self.pending
        if fresh:
            self._collect()
        samples, notes = self.pending.pop(0), self.notes if fresh else {}
        if not self.pending:
            self.iteration += 1
        # Tokens are fresh if the weights have not changed since: in the first update only.
        version = self.version if fresh else -1
        batch = as_batch(samples, version, self.settings.level, {}, notes)
        batch.samples, batch.warnings = (self.told, self.warnings) if fresh else ([], [])
        if self.reference is not None:
            batch.columns["reference"] = self._under(self.reference, batch)
        return batch

    @property
    def trained(self) -> Model:
        raise NotImplementedError

    def _keep_began(self, samples: Sequence[Sample]) -> None:
        batch = as_batch(samples, self.version, self.settings.level, {}, {})
        began_T = self._under(self.trained, batch, self.settings.replay)
        for sample, own_T in zip(samples, began_T.split(batch.lengths), strict=True):
            sample.began = own_T[len(sample.prompt) - 1 : -1].tolist()

    def _under(self, model: Model, batch: Batch, replay: bool = False) -> Tensor:
        """Log-probabilities of the answers under some weights, drawn in the same way."""
        (there,) = batch.parts(1, model.output.device)
        routes = {int(name[7:]): column for name, column in there.columns.items() if name.startswith("routes/")}
        routing = Routing(routes, replay=True) if replay else None
        with torch.no_grad():
            logprobs_T, _ = model.token_logprobs(
                model(there.tokens_T, Layout(there.lengths, device=model.device), routing),
                there.targets_T,
                temperature=self.settings.wishes["temperature"],
                kept_TK=there.columns.get("kept"),
            )
        return logprobs_T.cpu()

    def gather(self) -> tuple[list[list[Sample]], list[Rolled]]:
        """The groups of the next set of rollouts, and all that was asked for them; the weights are new."""
        raise NotImplementedError

    def questions(self) -> list[Place]:
        """What to ask next, in one go."""
        count = self.settings.prompts
        return self.selector.choose(self.selector.needed(count) if self.settings.dynamic > 1 else count)

    def extra_notes(self) -> dict[str, float]:
        """More to record of a set of rollouts."""
        return {}

    def _collect(self) -> None:
        settings = self.settings
        groups, every = self.gather()
        # In 64 bits: in 32 the mean of equal rewards is often another number, and the difference counts as spread.
        rewards_QG = torch.tensor([[sample.judged.total for sample in group] for group in groups], dtype=torch.float64)
        advantages_QG = ADVANTAGES[settings.advantage](rewards_QG)
        for group, advantages in zip(groups, advantages_QG.tolist()):
            for sample, advantage in zip(group, advantages):
                sample.advantage = advantage
        samples = [sample for group in groups for sample in group]
        if not any(sample.tokens for sample in samples):
            raise UserError("align.stages", "no answer has a token", "Raise max_tokens.")
        size = -(-len(samples) // settings.updates)
        order = torch.randperm(
            len(samples), generator=torch.Generator().manual_seed(seed_of(settings.seed, self.iteration))
        )
        shuffled = [samples[n] for n in order.tolist()] if settings.updates > 1 else samples
        self.pending = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
        for chunk in self.pending if settings.began else ():
            self._keep_began(chunk)
        self.notes = _notes(every, groups) | self.selector.notes() | self.extra_notes()
        # Two that differ, if there are two: answers to one question are often the same, word for word.
        self.told = list(dict.fromkeys(one.told() for one in every[0].groups[0]))[:2]
        self.warnings = self._explained([problem for rolled in every for problem in rolled.problems])

    def _explained(self, problems: Sequence[str]) -> list[str]:
        """Why answers count as reward_problems: the first reason of each reward, once."""
        found: dict[str, list[str]] = {}
        for problem in problems:
            name, _, why = problem.partition(": ")
            found.setdefault(name, []).append(why)
        fresh = {name: whys for name, whys in found.items() if name not in self.explained}
        self.explained |= fresh.keys()
        return [
            f"the reward {name} failed on {len(whys):,} answers, which get nothing for it "
            f"(reward_problems in metrics.jsonl counts them): {whys[0]}"
            for name, whys in fresh.items()
        ]


@dataclass(kw_only=True)
class RolloutStream(PolicyStream):
    """Asks the engine that holds the trainer's own weights, and waits for it."""

    engine: Engine
    rewards: Sequence[tuple[str, float, Reward]]
    begin: Begin | None = None  # of answers in an environment; else plain ones are asked for

    @property
    def trained(self) -> Model:
        return self.engine.model

    def gather(self) -> tuple[list[list[Sample]], list[Rolled]]:
        """Ask until there are enough questions that teach something, or patience is at its end."""
        settings = self.settings
        self.engine.version = self.version
        self.engine.weights_changed()
        self.version = self.engine.version
        groups: list[list[Sample]] = []
        every: list[Rolled] = []
        for attempt in range(settings.dynamic):
            places = self.questions()
            examples = [self.examples[place] for place in places]
            seeds = [seed_of(settings.seed, self.iteration, attempt, n) for n in range(len(examples))]
            if self.begin is not None:
                rolled = play(self.engine, examples, self.begin, self.rewards, seeds)
            else:
                rolled = roll(self.engine, examples, settings.group, settings.wishes, self.rewards, seeds)
            every.append(rolled)
            for place, group in zip(places, rolled.groups, strict=True):
                self.selector.learn(place, group)
            groups += [group for group in rolled.groups if settings.dynamic == 1 or teaches(group)]
            if len(groups) >= settings.prompts:
                break
        # Nothing to learn is better than a shape of nothing.
        return groups[: settings.prompts] or every[-1].groups, every


def teaches(group: Sequence[Sample]) -> bool:
    """Answers that are all worth the same say nothing about which is better."""
    return len({sample.judged.total for sample in group}) > 1


def _notes(every: Sequence[Rolled], groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Over all that was sampled, not only what is learned from."""
    samples = [sample for rolled in every for group in rolled.groups for sample in group]
    steps = sum(rolled.steps for rolled in every)
    return {
        "reward": sum(sample.judged.total for sample in samples) / len(samples),
        "answer_tokens": sum(len(sample.tokens) for sample in samples) / len(samples),
        "cut_off": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "groups": float(len(groups)),
        "rounds": float(len(every)),
        "staleness_max": 0.0,
        "accepted_per_step": sum(rolled.accepted for rolled in every) / max(steps, 1),
        "tokens_per_pass": sum(rolled.generated for rolled in every) / max(steps, 1),
        "reward_problems": float(sum(len(rolled.problems) for rolled in every)),
    }
