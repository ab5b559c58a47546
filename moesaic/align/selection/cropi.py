"""Prompts by their off-policy influence (CROPI): learn from those whose policy gradient points where the gradient of
a validation set points.

    selection: {name: cropi, pool: 96, validation: 16, share: 0.25, every: 10}

There is a pool of prompts, the first of them for validation. Each is sampled once; from then on, every `every` sets of
rollouts, the gradient of each prompt is computed from its stored completions under the weights of now (no rollouts),
shrunk by dropping most of its dimensions and then by a sparse random projection, and the prompts with the largest
inner product with the validation gradient, `share` of the pool, are what is sampled until the next time. Validation
prompts are sampled again each time, so that their completions stay those of a recent policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from moesaic.align.examples import Mixture, Place
from moesaic.align.rollouts.rollout import Sample
from moesaic.align.selection import Selection, Selector
from moesaic.data.packing import IGNORED
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model


@dataclass(frozen=True)
class Cropi(Selection):
    on_ranks: ClassVar[bool] = False  # it takes gradients of all parameters

    pool: int = 128  # prompts in play, validation included
    validation: int = 16
    share: float = 0.25  # of the pool that is sampled until the next selection
    every: int = 10  # times prompts are chosen, between selections
    kept: int = 65_536  # dimensions of the gradient that are not dropped
    dims: int = 1024  # that they are projected to
    density: float = 0.01  # of the projection

    def __post_init__(self) -> None:
        if not 0 < self.validation < self.pool or not 0 < self.share <= 1 or self.every < 1:
            raise ValueError("validation lies between 0 and pool, share between 0 and 1, and every is at least 1")
        if min(self.kept, self.dims) < 1 or not 0 < self.density <= 1:
            raise ValueError("kept and dims are at least 1, and density lies between 0 and 1")

    def begin(self, examples: Mixture, model: Model, seed: int) -> Selector:
        return ByInfluence(self, examples, model, seed)


class ByInfluence(Selector):
    def __init__(self, options: Cropi, examples: Mixture, model: Model, seed: int) -> None:
        self.options, self.model, self.seed = options, model, seed
        turns = examples.at([0] * len(examples.sources))
        self.pool = [turns.turn() for _ in range(options.pool)]
        self.queue: list[Place] = list(self.pool)  # to be sampled before anything is chosen
        self.selected: list[Place] = []
        self.stored: dict[Place, list[dict[str, Any]]] = {}  # the latest completions of each prompt
        self.since = 0
        self.chosen = 0
        self.influence: dict[Place, float] = {}

    def choose(self, count: int) -> list[Place]:
        if not self.queue and (not self.selected or self.since >= self.options.every):
            self._select()
        self.since += 1
        places = [self.queue.pop(0) for _ in range(min(count, len(self.queue)))]
        while len(places) < count:
            draw = random.Random(f"{self.seed} {self.chosen}")
            self.chosen += 1
            places.append(draw.choice(self.selected or self.pool))
        return places

    def upcoming(self, count: int) -> list[Place]:
        """As far as it is chosen already: a look should not cost the gradients of a selection."""
        return self.queue[:count]

    def learn(self, place: Place, group: Sequence[Sample]) -> None:
        mean = sum(sample.judged.total for sample in group) / len(group)
        self.stored[place] = [
            {
                "prompt": sample.prompt,
                "tokens": sample.tokens,
                "learn": sample.learned,
                "advantage": sample.judged.total - mean,
            }
            for sample in group
            if any(sample.learned) and sample.judged.total != mean
        ]

    def state(self) -> dict[str, Any]:
        return {
            "queue": self.queue,
            "selected": self.selected,
            "stored": [[*place, answers] for place, answers in sorted(self.stored.items())],
            "since": self.since,
            "chosen": self.chosen,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.queue = [(source, number) for source, number in state["queue"]]
        self.selected = [(source, number) for source, number in state["selected"]]
        self.stored = {(source, number): answers for source, number, answers in state["stored"]}
        self.since, self.chosen = state["since"], state["chosen"]

    def notes(self) -> dict[str, float]:
        if not self.influence:
            return {}
        chosen = [self.influence[place] for place in self.selected]
        found, self.influence = self.influence, {}
        return {
            "influence_selected": sum(chosen) / len(chosen),
            "influence_all": sum(found.values()) / len(found),
        }

    def _select(self) -> None:
        validation, others = self.pool[: self.options.validation], self.pool[self.options.validation :]
        shrink = Shrink(self.options, self.seed)
        wanted_K = torch.zeros(self.options.dims)
        for place in validation:
            if self.stored.get(place):
                wanted_K += shrink(gradient(self.model, self.stored[place]))
        known = [place for place in others if self.stored.get(place)]
        # A prompt whose completions all have the same reward has no gradient, and no influence.
        self.influence = dict.fromkeys(others, 0.0)
        self.influence |= {p: float(shrink(gradient(self.model, self.stored[p])) @ wanted_K) for p in known}
        best = sorted(others, key=lambda place: (-self.influence[place], place))
        again = bool(self.selected)
        self.selected = best[: max(1, round(self.options.share * len(self.pool)))]
        self.queue, self.since = list(validation) if again else [], 0


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
