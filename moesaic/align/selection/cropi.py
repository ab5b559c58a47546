"""Prompts by their off-policy influence (CROPI): learn from those whose policy gradient points where the gradient of
a validation set points.

    selection: {name: cropi, validation: [{path: "builtin:sums"}], pool: 128, share: 0.25, every: 10}

Of a pool of prompts, and of the validation set, trajectories are sampled once, before the first step, and stored. Every
`every` steps the gradient of each prompt is computed from its stored trajectories under the weights of now (no
rollouts), shrunk by dropping most of its dimensions and then by a sparse random projection, and the `share` of the pool
with the largest inner product with the validation gradient is what is trained on until the next selection. What is
trained on is sampled anyway, so its stored trajectories are replaced by the newer ones; those of the validation set
are sampled again at each selection (`resample`). The validation set is never trained on, and no prompt that is in it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.align.examples import Mixture, Place, open_prompts
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.selection import Explore, Selection, Selector
from moesaic.align.stages import Data, sources, there
from moesaic.data.packing import IGNORED
from moesaic.errors import UserError
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.worlds.completions import seed_of
from moesaic.worlds.example import Example

Trajectory = dict[str, Any]  # prompt, tokens, learn, advantage


@dataclass(frozen=True)
class Cropi(Selection):
    on_ranks: ClassVar[bool] = False  # it takes gradients of all parameters

    validation: Data = ()  # [{path, weight, skip}], as a stage's data
    validation_prompts: int = 16  # of it
    pool: int = 128  # prompts of the stage's data that can be chosen
    share: float = 0.25  # of the pool that is trained on until the next selection
    every: int = 10  # times prompts are chosen, between selections
    resample: bool = True  # the validation prompts, at each selection
    kept: int = 65_536  # dimensions of the gradient that are not dropped
    dims: int = 1024  # that they are projected to
    density: float = 0.01  # of the projection

    def __post_init__(self) -> None:
        if not self.validation:
            raise ValueError("cropi wants validation: [{path: ...}], prompts that are not trained on")
        sources(self.validation)
        if min(self.pool, self.validation_prompts, self.every) < 1 or not 0 < self.share <= 1:
            raise ValueError("pool, validation_prompts and every are at least 1, and share lies between 0 and 1")
        if min(self.kept, self.dims) < 1 or not 0 < self.density <= 1:
            raise ValueError("kept and dims are at least 1, and density lies between 0 and 1")

    def check(self, own_tasks: bool) -> None:
        if own_tasks:
            problem = "the environment has tasks of its own, and validation names others"
            raise UserError("align.stages: selection", problem, "Choose another selection.")
        if found := there(self.validation):
            open_prompts(found, 0)

    def begin(self, examples: Mixture, model: Model, seed: int, explore: Explore) -> Selector:
        return ByInfluence(self, examples, model, seed, explore)


class ByInfluence(Selector):
    def __init__(self, options: Cropi, examples: Mixture, model: Model, seed: int, explore: Explore) -> None:
        self.options, self.examples, self.model, self.seed, self.explore = options, examples, model, seed, explore
        validation = open_prompts(options.validation, seed)
        self.validation = [next(validation) for _ in range(options.validation_prompts)]
        self.pool = distinct(examples, options.pool, self.validation)
        self.selected: list[Place] = []
        self.queue: list[Place] = []  # of the selected, in random order
        self.stored: dict[Place, list[Trajectory]] = {}  # the latest of each prompt of the pool
        self.wanted: list[list[Trajectory]] = []  # and of the validation set
        self.since = self.selections = self.epochs = self.explored = 0
        self.influence: dict[Place, float] = {}

    def choose(self, count: int) -> list[Place]:
        if not self.selected or self.since >= self.options.every:
            self._select()
        self.since += 1
        places: list[Place] = []
        while len(places) < count:
            if not self.queue:
                self.queue = list(self.selected)
                random.Random(f"{self.seed} {self.epochs}").shuffle(self.queue)
                self.epochs += 1
            places.append(self.queue.pop())
        return places

    def upcoming(self, count: int) -> list[Place]:
        """As far as it is chosen already: a look should not cost the gradients of a selection."""
        return self.queue[: -count - 1 : -1]

    def learn(self, place: Place, group: Sequence[Sample]) -> None:
        self.stored[place] = trajectories(group)

    def state(self) -> dict[str, Any]:
        return {
            "queue": self.queue,
            "selected": self.selected,
            "stored": [[*place, kept] for place, kept in sorted(self.stored.items())],
            "wanted": self.wanted,
            "since": self.since,
            "selections": self.selections,
            "epochs": self.epochs,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.queue = [(source, number) for source, number in state["queue"]]
        self.selected = [(source, number) for source, number in state["selected"]]
        self.stored = {(source, number): kept for source, number, kept in state["stored"]}
        self.wanted = [list(kept) for kept in state["wanted"]]
        self.since, self.selections, self.epochs = state["since"], state["selections"], state["epochs"]

    def notes(self) -> dict[str, float]:
        """Of a step that has selected anew."""
        if not self.influence:
            return {}
        chosen = [self.influence[place] for place in self.selected]
        found, self.influence = self.influence, {}
        explored, self.explored = self.explored, 0
        return {
            "influence_selected": sum(chosen) / len(chosen),
            "influence_all": sum(found.values()) / len(found),
            "explored": float(explored),
        }

    def _select(self) -> None:
        if not self.stored:
            groups = self._explore([self.examples[place] for place in self.pool], 0)
            self.stored = {place: trajectories(group) for place, group in zip(self.pool, groups, strict=True)}
        if not self.wanted or self.options.resample:
            self.wanted = [trajectories(group) for group in self._explore(self.validation, 1)]
        shrink = Shrink(self.options, self.seed)
        wanted_K = torch.zeros(self.options.dims)
        for kept in filter(None, self.wanted):
            wanted_K += shrink(gradient(self.model, kept))
        # A prompt whose completions all have the same reward has no gradient, and no influence.
        known = [place for place in self.pool if self.stored[place]]
        self.influence = dict.fromkeys(self.pool, 0.0)
        self.influence |= {p: float(shrink(gradient(self.model, self.stored[p])) @ wanted_K) for p in known}
        best = sorted(self.pool, key=lambda place: (-self.influence[place], place))
        self.selected = best[: max(1, round(self.options.share * len(self.pool)))]
        self.queue, self.since = [], 0
        self.selections += 1

    def _explore(self, examples: Sequence[Example], which: int) -> list[list[Sample]]:
        seeds = [seed_of(self.seed, self.selections, which, number) for number in range(len(examples))]
        groups = self.explore(examples, seeds)
        self.explored += sum(map(len, groups))
        return groups


def distinct(examples: Mixture, count: int, other_than: Sequence[Example]) -> list[Place]:
    """The places of the first so many different prompts, none of them in `other_than`. Of a file there may be fewer."""
    turns = examples.at([0] * len(examples.sources))
    seen = {_words(example) for example in other_than}
    found: list[Place] = []
    missed = 0
    while len(found) < count and missed <= count:
        place = turns.turn()
        words = _words(examples[place])
        if words in seen:
            missed += 1
            continue
        seen.add(words)
        found.append(place)
        missed = 0
    if not found:
        raise UserError("align.stages: selection", "every prompt of data is in validation", "Hold some out by name.")
    return found


def _words(example: Example) -> str:
    return json.dumps([example.messages, example.facts.get("tools")], sort_keys=True)


def trajectories(group: Sequence[Sample]) -> list[Trajectory]:
    """What a gradient needs of completions; those as good as their group's mean have none."""
    mean = sum(sample.judged.total for sample in group) / len(group)
    return [
        {
            "prompt": sample.prompt,
            "tokens": sample.tokens,
            "learn": sample.learned,
            "advantage": sample.judged.total - mean,
        }
        for sample in group
        if any(sample.learned) and sample.judged.total != mean
    ]


def gradient(model: Model, answers: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Of the expected reward, from completions that were sampled earlier, at the weights of now."""
    tokens: list[int] = []
    targets: list[int] = []
    advantages: list[float] = []
    lengths: list[int] = []
    for answer in answers:
        before, spoken = len(answer["prompt"]) - 1, len(answer["tokens"])
        tokens += [*answer["prompt"], *answer["tokens"]]
        learned = [token if learn else IGNORED for token, learn in zip(answer["tokens"], answer["learn"], strict=True)]
        targets += [IGNORED] * before + learned + [IGNORED]
        advantages += [0.0] * before + [answer["advantage"] / sum(answer["learn"])] * spoken + [0.0]
        lengths.append(before + 1 + spoken)
    device = model.device
    hidden_TD = model(torch.tensor(tokens, device=device), Layout(lengths, device=device))
    targets_T = torch.tensor(targets, device=device)
    logprobs_T, _ = model.token_logprobs(hidden_TD, targets_T)
    value = (logprobs_T * torch.tensor(advantages, device=device)).sum() / len(answers)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(value, parameters, allow_unused=True)
    return [g if g is not None else torch.zeros_like(p) for g, p in zip(found, parameters)]


class Shrink:
    """The same few dimensions of every gradient, projected by a sparse matrix of -1, 0 and 1, scaled so that inner
    products are kept on average."""

    def __init__(self, options: Cropi, seed: int) -> None:
        self.options = options
        self.draw = torch.Generator().manual_seed(seed)
        self.places_J: Tensor | None = None

    def __call__(self, gradients: Iterable[Tensor]) -> Tensor:
        flat_G = torch.cat([gradient.detach().flatten().float().cpu() for gradient in gradients])
        if self.places_J is None:
            self._begin(len(flat_G))
        assert self.places_J is not None
        entries_JE = self.signs_JE * flat_G[self.places_J][:, None]
        return torch.zeros(self.options.dims).index_add(0, self.rows_JE.flatten(), entries_JE.flatten())

    def _begin(self, size: int) -> None:
        kept, dims = min(self.options.kept, size), self.options.dims
        self.places_J = torch.randperm(size, generator=self.draw)[:kept]
        each = max(1, round(self.options.density * dims))  # entries of one kept dimension
        self.rows_JE = torch.randint(dims, (kept, each), generator=self.draw)
        signs_JE = torch.randint(2, (kept, each), generator=self.draw).float() * 2 - 1
        self.signs_JE = signs_JE * (size / kept / each) ** 0.5
