"""RL as the algorithm: `PolicyStream.steps` is GRPO from one weight sync to the next, and each batch it yields is one
training step of `train/loop.py`.

One set of rollouts is learned from in `updates` minibatches. DAPO's dynamic sampling goes on sampling while all
completions of a prompt have the same reward, because such a group has no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from moesaic.align.advantages import ADVANTAGES
from moesaic.align.examples import Mixture, Place
from moesaic.align.rewards import Reward
from moesaic.align.rollouts.engine_work import EngineWork
from moesaic.align.rollouts.multi_turn import generate_multi_turn
from moesaic.align.rollouts.pool import StartGroup
from moesaic.align.rollouts.rollout import Rollouts, Sample, as_batch, generate, rewards_of
from moesaic.align.rollouts.weight_sync import WeightSync
from moesaic.align.selection import Selector
from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.phases import phase
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import seed_of


@dataclass(frozen=True)
class RolloutSettings:
    prompts: int
    group: int
    updates: int
    advantage: str
    level: str
    dynamic: int  # rounds of sampling for one set of rollouts, at most
    sampling: Mapping[str, Any]  # max_tokens, temperature, ...
    seed: int
    began: bool = False  # whether the trainer's own log-probabilities before the first update are kept
    replay: bool = False  # and whether they are of the engine's routes
    right: float | None = None  # the reward from which on a completion is imitated
    each: Mapping[str, float] | None = None  # rewards that are normalised one by one, by name: their weights


@dataclass(kw_only=True)
class PolicyStream:
    """Batches of a policy's own rollouts, however they are sampled."""

    model: Model  # the policy, with the trainer's own parameters
    weights: WeightSync
    examples: Mixture
    settings: RolloutSettings
    selector: Selector
    reference: Model | None = None
    world: World = field(default_factory=lambda: World(torch.device("cpu")))  # ranks that sample, too
    iteration: int = 0  # sets of rollouts that were learned from
    version: int = 0  # of the weights: how many times they were pushed
    pending: list[list[Sample]] = field(default_factory=list)  # minibatches of the present rollouts, not yet trained on
    notes: dict[str, float] = field(default_factory=dict)
    shown: list[str] = field(default_factory=list)  # a few completions with their rewards, for the log
    warnings: list[str] = field(default_factory=list)  # of the present rollouts
    explained: set[str] = field(default_factory=set)  # rewards whose failures were logged
    _steps: Iterator[Batch] | None = field(default=None, init=False, repr=False, compare=False)

    def __next__(self) -> Batch:
        if self._steps is None:
            self._steps = self.steps()
        return next(self._steps)

    def steps(self) -> Iterator[Batch]:
        """The policy gradient, step by step. A `yield` hands a minibatch to the training loop, which comes back for the
        next one when the optimizer has taken its step."""
        while True:
            on_policy = not self.pending  # else the run was resumed between two updates from the same rollouts
            if on_policy:
                self.sync_weights()  # the engine samples from what the trainer has learned so far
                with phase("generate"):
                    groups, rounds = self.collect_rollouts()  # prompts, completions of each, and their rewards
                self.set_advantages(groups)  # how much better than the rest of its group each completion is
                self.pending = self.minibatches(groups)
                self.record(groups, rounds)
            while self.pending:
                batch = self.next_minibatch(on_policy)
                yield batch  # train/loop.py: forward, loss of the policy objective, backward, optimizer step
                on_policy = False

    def sync_weights(self) -> None:
        self.version += 1
        with phase("sync"):
            self.weights.push(self.model, self.version)

    def collect_rollouts(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        """The groups to learn from next, and all that was sampled for them."""
        raise NotImplementedError

    def next_prompts(self) -> list[Place]:
        """Those of one round of sampling."""
        count = self.settings.prompts
        return self.selector.choose(self.selector.needed(count) if self.settings.dynamic > 1 else count)

    def set_advantages(self, groups: Sequence[Sequence[Sample]]) -> None:
        advantages_QG = ADVANTAGES[self.settings.advantage](rewards_of(groups, self.settings.each))
        for group, advantages in zip(groups, advantages_QG.tolist()):
            for sample, advantage in zip(group, advantages):
                sample.advantage = advantage

    def minibatches(self, groups: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        settings = self.settings
        samples = [sample for group in groups for sample in group]
        if not any(sample.tokens for sample in samples):
            raise UserError("align.stages", "no completion has a token", "Raise max_tokens.")
        size = -(-len(samples) // settings.updates)
        order = torch.randperm(
            len(samples), generator=torch.Generator().manual_seed(seed_of(settings.seed, self.iteration))
        )
        shuffled = [samples[n] for n in order.tolist()] if settings.updates > 1 else samples
        found = [shuffled[start : start + size] for start in range(0, len(shuffled), size)]
        for minibatch in found if settings.began else ():
            self._keep_began(minibatch)
        return found

    def next_minibatch(self, on_policy: bool) -> Batch:
        """`on_policy`: nothing was learned since these were sampled, so this is the first update from them."""
        samples = self.pending.pop(0)
        if not self.pending:
            self.iteration += 1
        notes = self.notes if on_policy else {}
        batch = as_batch(samples, self.version if on_policy else -1, self.settings.level, {}, notes)
        if self.settings.right is not None:
            batch.columns["imitate"] = imitated(batch, self.settings.right)
        batch.samples, batch.warnings = self.shown, self.warnings if on_policy else []
        if self.reference is not None:
            batch.columns["reference"] = self._logprobs(self.reference, batch)
        return batch

    # -- log-probabilities of the trainer

    def _keep_began(self, samples: Sequence[Sample]) -> None:
        batch = as_batch(samples, self.version, self.settings.level, {}, {})
        began_T = self._logprobs(self.model, batch, self.settings.replay)
        for sample, own_T in zip(samples, began_T.split(batch.lengths), strict=True):
            sample.began = own_T[len(sample.prompt) - 1 : -1].tolist()

    def _logprobs(self, model: Model, batch: Batch, replay: bool = False) -> Tensor:
        """Of the completions under some weights, by the distribution they were drawn from; each rank computes some."""
        row_T = torch.arange(len(batch.tokens_T))
        marked = replace(batch, columns={**batch.columns, "row": row_T})
        mine = marked.share(self.world.data_rank, self.world.data_ranks)
        with phase("logprobs"), self.world.evaluating(model):
            own_T = self._own_logprobs(model, mine, replay)
        whole_T = own_T.new_zeros(len(row_T)).index_copy(0, mine.columns["row"], own_T)
        return self.world.total(whole_T)

    def _own_logprobs(self, model: Model, batch: Batch, replay: bool) -> Tensor:
        (there,) = batch.parts(1, model.device)
        routes = {int(name[7:]): column for name, column in there.columns.items() if name.startswith("routes/")}
        routing = Routing(routes, replay=True) if replay else None
        with torch.no_grad():
            logprobs_T, _ = model.token_logprobs(
                model(there.tokens_T, Layout(there.lengths, device=model.device), routing),
                there.targets_T,
                temperature=self.settings.sampling["temperature"],
                kept_TK=there.columns.get("kept"),
            )
        return logprobs_T.cpu()

    # -- what is recorded

    def record(self, groups: Sequence[Sequence[Sample]], rounds: Sequence[Rollouts]) -> None:
        self.notes = _notes(rounds, groups) | self.selector.notes() | self.extra_notes()
        # Two that differ, if there are two: completions of one prompt are often the same, word for word.
        self.shown = list(dict.fromkeys(sample.line() for sample in rounds[0].groups[0]))[:2]
        self.warnings = self._explained([problem for rollouts in rounds for problem in rollouts.problems])

    def extra_notes(self) -> dict[str, float]:
        """More to record of a set of rollouts."""
        return {}

    def _explained(self, problems: Sequence[str]) -> list[str]:
        """Why completions count as reward_problems: the first reason of each reward, once."""
        found: dict[str, list[str]] = {}
        for problem in problems:
            name, _, why = problem.partition(": ")
            found.setdefault(name, []).append(why)
        fresh = {name: whys for name, whys in found.items() if name not in self.explained}
        self.explained |= fresh.keys()
        return [
            f"the reward {name} failed on {len(whys):,} completions, which get nothing for it "
            f"(reward_problems in metrics.jsonl counts them): {whys[0]}"
            for name, whys in fresh.items()
        ]

    # -- resuming

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
        """A rewound run samples new prompts."""
        assert isinstance(past, Mapping)
        return self.from_position(dict(past) | {"pending": []})


@dataclass(kw_only=True)
class RolloutStream(PolicyStream):
    """Samples from the engine that holds the trainer's own weights, and waits for it."""

    engine: Engine
    rewards: Sequence[tuple[str, float, Reward]]
    start_group: StartGroup | None = None  # of rollouts in an environment; else they are of a single turn

    def collect_rollouts(self) -> tuple[list[list[Sample]], list[Rollouts]]:
        """Sample until there are enough informative groups, or `dynamic` rounds were taken."""
        settings = self.settings
        groups: list[list[Sample]] = []
        rounds: list[Rollouts] = []
        while len(rounds) < settings.dynamic and len(groups) < settings.prompts:
            prompts = self.next_prompts()
            rollouts = self._generate(prompts, len(rounds))
            for prompt, group in zip(prompts, rollouts.groups, strict=True):
                self.selector.learn(prompt, group)
            groups += [group for group in rollouts.groups if settings.dynamic == 1 or informative(group, settings.each)]
            rounds.append(rollouts)
        # Nothing to learn is better than a shape of nothing.
        return groups[: settings.prompts] or rounds[-1].groups, rounds

    def _generate(self, prompts: Sequence[Place], attempt: int) -> Rollouts:
        """A group of completions of each prompt, with their rewards. Ranks take prompts in turn; a completion's seed
        says which it is, not who samples it."""
        world, settings = self.world, self.settings
        mine = range(world.data_rank, len(prompts), world.data_ranks)
        examples = [self.examples[prompts[n]] for n in mine]
        seeds = [seed_of(settings.seed, self.iteration, attempt, n) for n in mine]
        with world.doing("generate", patient=True), world.generating(self.model):
            if self.start_group is not None:
                own = generate_multi_turn(self.engine, examples, self.start_group, self.rewards, seeds)
            else:
                own = generate(self.engine, examples, settings.group, settings.sampling, self.rewards, seeds)
        return own if world.data_ranks == 1 else own.with_others(world.collect, len(prompts))


def imitated(batch: Batch, right: float) -> Tensor:
    """How much each token counts in the likelihood of right completions: all of them the same, one in all."""
    right_T = (batch.columns["weight"] > 0) & (batch.columns["reward"] >= right)
    return right_T / right_T.sum().clamp(min=1)


def informative(group: Sequence[Sample], each: Mapping[str, float] | None = None) -> bool:
    """Completions that all have the same reward say nothing about which is better."""
    return len(set(rewards_of([group], each)[0].tolist())) > 1


def _notes(rounds: Sequence[Rollouts], groups: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Over all that was sampled, not only what is learned from."""
    samples = [sample for rollouts in rounds for group in rollouts.groups for sample in group]
    work = sum((rollouts.work for rollouts in rounds), EngineWork())
    rewards = [sample.judged.total for sample in samples]
    mean = sum(rewards) / len(samples)
    return {
        "reward": mean,
        "reward_std": (sum((reward - mean) ** 2 for reward in rewards) / len(samples)) ** 0.5,
        "answer_tokens": sum(len(sample.tokens) for sample in samples) / len(samples),
        "cut_off": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "groups": float(len(groups)),
        "rounds": float(len(rounds)),
        "staleness_max": 0.0,
        "accepted_per_step": work.accepted / max(work.steps, 1),
        "tokens_per_pass": work.generated / max(work.steps, 1),
        "reward_problems": float(sum(len(rollouts.problems) for rollouts in rounds)),
        **_each_reward(samples),
    }


def _each_reward(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of each, where there are several: their sum does not say which of them is learned."""
    names = samples[0].judged.parts
    given = {name: [p for sample in samples if (p := sample.judged.parts[name]) is not None] for name in names}
    return {f"reward/{name}": sum(parts) / len(parts) for name, parts in given.items() if parts and len(names) > 1}
