"""Preference optimization (DPO and its kin): data is JSON lines of {prompt | messages, chosen, rejected}.

align:
  stages:
    - name: preference
      steps: 200
      data: [{path: pairs.jsonl}]
      held_out: [{path: more-pairs.jsonl}]
      objective: {kind: sigmoid, beta: 0.1}

With `samples`, data are prompts and the pairs are of the model's own completions (preference/own_samples.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from moesaic.align.examples import Shuffled
from moesaic.align.preference.batch import GroupStream, pack_pairs
from moesaic.align.preference.pairs import Pair, check_pairs, read_source
from moesaic.align.preference.reference import answer_logprobs, reference_logprobs
from moesaic.align.stages import Data, Measure
from moesaic.align.stages._pair_stage import PairStage
from moesaic.data.stream import Stream
from moesaic.data.tasks import Split
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.world import World
from moesaic.train.objectives import Objective
from moesaic.train.objectives.preference import Preference as PreferenceObjective


@dataclass(frozen=True)
class Preference(PairStage):
    on_ranks: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = (
        *PairStage.records,
        *("logprob_chosen", "logprob_rejected"),
    )

    def check_lines(self, data: Data) -> None:
        check_pairs(data)

    def check_ranks(self, layout: ParallelLayout, accumulate: int, context: int, key: str) -> None:
        if self.samples is not None:
            problem = "samples are compared by one process"
            raise UserError(f"{key}.samples", problem, "Sample them in a run of their own, and name its pairs as data.")
        each = layout.dp * accumulate
        if self.batch_pairs % each:
            problem = f"{self.batch_pairs} pairs cannot be shared evenly by {layout.dp} data ranks x {accumulate} parts"
            remedy = f"Nearest that works: {key}.batch_pairs={max(1, round(self.batch_pairs / each)) * each}."
            raise UserError(f"{key}.batch_pairs", problem, remedy)

    def objective_method(self) -> Method:
        return Method("preference", self.objective)

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        data, sampled = self.pairs_of(model, out)
        read, left_out = read_pairs(model, data, "train", self.pairs, self.max_length, self.seed)
        opened = [Shuffled(pairs, self.seed) for pairs in read]
        weights = [float(source.get("weight", 1.0)) for source in data]
        notes = {"pairs_left_out": float(left_out)} | sampled
        plain = GroupStream(opened, weights, self.batch_pairs, partial(pack_pairs, notes=notes))
        if not self._objective().reference:
            return plain
        wanted = frozenset(pair.number for pair in plain.coming(self.steps))
        everything = [pair for pairs in read for pair in pairs]
        reference_P2 = reference_logprobs(model, everything, wanted, out / "reference", world)
        pack = partial(pack_pairs, reference_P2=reference_P2, notes=notes)
        return GroupStream(opened, weights, self.batch_pairs, pack, wanted)

    def measure(self, model: Model) -> Measure | None:
        data, split = self.held_out_data()
        if not data or not self.evaluate:
            return None
        read, _ = read_pairs(model, data, split, self.evaluate, self.max_length)
        return PairAccuracy(model, [pair for pairs in read for pair in pairs][: self.evaluate], self._objective())

    def measures(self) -> tuple[str, ...]:
        return ("accuracy", "held_out_margin") if self.held_out_data()[0] and self.evaluate else ()

    def _objective(self) -> PreferenceObjective:
        objective = build(self.objective_method(), Objective, "align.stages: objective")
        assert isinstance(objective, PreferenceObjective)
        return objective


class PairAccuracy:
    """The share of held-out pairs whose chosen completion has the higher implicit reward. `model` has its weights from
    before the stage."""

    def __init__(self, model: Model, pairs: list[Pair], objective: PreferenceObjective) -> None:
        self.objective = objective
        self.said = [side for pair in pairs for side in pair.sides]
        self.tokens_S = torch.tensor([sum(side.learn) for side in self.said])
        self.reference_S = answer_logprobs(model, self.said).cpu() if objective.reference else None

    def __call__(self, model: Model) -> dict[str, float]:
        rewards_S = self.objective.rewards(answer_logprobs(model, self.said).cpu(), self.reference_S, self.tokens_S)
        lead_P = rewards_S[::2] - rewards_S[1::2]
        return {"accuracy": float((lead_P > 0).float().mean()), "held_out_margin": float(lead_P.mean())}


def read_pairs(
    model: Model, data: Data, split: Split, max_pairs: int, max_length: int, seed: int = 0
) -> tuple[list[list[Pair]], int]:
    """The pairs of each source, numbered through, and how many were too long."""
    assert model.tokenizer is not None
    read: list[list[Pair]] = []
    first = left_out = 0
    for source in data:
        path = str(source["path"])
        max_tokens = min(max_length, model.config.context)
        pairs, long = read_source(model.tokenizer, path, split, max_pairs, max_tokens, first, seed)
        read.append(pairs)
        left_out += long
        first = max(pair.number for pair in pairs) + 1
    return read, left_out
