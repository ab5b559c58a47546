"""A reward model: the model with a value head, trained on which completion of a pair is better, which steps are right.

align:
  stages:
    - {name: reward_model, steps: 200, data: [{path: pairs.jsonl}], lengths: weigh, objective: {stability: 0.01}}
    - {name: policy, rewards: [{name: model, path: "stage:1"}], data: [{path: prompts.jsonl}]}

With `samples`, data are prompts and the pairs are of the model's own completions (preference/own_samples.py).

The next stage starts from the model this one started from, and may use what this one made (`stage:1`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from moesaic.align.examples import Shuffled
from moesaic.align.preference.batch import GroupStream
from moesaic.align.preference.length_balance import Lengths, balanced, length_bias
from moesaic.align.preference.pairs import Pair, check_pairs
from moesaic.align.preference.reward_model import (
    Judgeable,
    JudgedAccuracy,
    check_judged,
    pack_judged,
    read_judged,
    weighed,
)
from moesaic.align.stages import Data, Measure
from moesaic.align.stages._pair_stage import PairStage
from moesaic.data.stream import Stream
from moesaic.data.tasks import Split
from moesaic.errors import UserError
from moesaic.methods import Method
from moesaic.model.transformer import Model
from moesaic.parallel.world import World


@dataclass(frozen=True)
class RewardModel(PairStage):
    value_head: ClassVar[bool] = True
    records: ClassVar[tuple[str, ...]] = (*PairStage.records, "steps_right", "length_bias")

    lengths: Lengths = "as_they_are"  # ChatGLM-RLHF's balancing of lengths

    @property
    def continues(self) -> bool:
        return False

    def check_lines(self, data: Data) -> None:
        check_pairs(data, check_judged)

    def objective_method(self) -> Method:
        return Method("reward_model", self.objective)

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        data, sampled = self.pairs_of(model, out)
        read, left_out = self._read(model, data, "train", self.pairs)
        everything = [item for items in read for item in items if isinstance(item, Pair)]
        kept = balanced(everything, self.lengths)
        read = [weighed(items, kept) for items in read]
        for source, items in zip(data, read, strict=True):
            if not items:
                problem = "no pair is left: in all of them the answer of the same side is longer"
                raise UserError(source["path"], problem, "Take lengths: weigh, or other pairs.")
        pairs = [item for items in read for item in items if isinstance(item, Pair)]
        notes = {"pairs_left_out": float(left_out + len(everything) - len(pairs))} | sampled
        notes |= {"length_bias": length_bias(pairs)} if pairs else {}
        opened = [Shuffled(items, self.seed) for items in read]
        weights = [float(source.get("weight", 1.0)) for source in data]
        return GroupStream(opened, weights, self.batch_pairs, partial(pack_judged, notes=notes))

    def measure(self, model: Model) -> Measure | None:
        data, split = self.held_out_data()
        if not data or not self.evaluate:
            return None
        read, _ = self._read(model, data, split, self.evaluate)
        return JudgedAccuracy([item for items in read for item in items][: self.evaluate])

    def measures(self) -> tuple[str, ...]:
        known = ("accuracy", "step_accuracy", "held_out_margin")
        return known if self.held_out_data()[0] and self.evaluate else ()

    def _read(self, model: Model, data: Data, split: Split, max_pairs: int) -> tuple[list[list[Judgeable]], int]:
        assert model.tokenizer is not None
        max_length = min(self.max_length, model.config.context)
        read: list[list[Judgeable]] = []
        first = left_out = 0
        for source in data:
            path = str(source["path"])
            items, long = read_judged(model.tokenizer, path, split, max_pairs, max_length, first, self.seed)
            read.append(items)
            first, left_out = max(item.number for item in items) + 1, left_out + long
        return read, left_out
