"""What stages on preference pairs have in common: where the pairs come from, and how many are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from moesaic.align.examples import BUILTIN, open_prompts
from moesaic.align.preference.own_samples import RECORDS, OwnSamples
from moesaic.align.stages import PAIRS, Data, Stage, sources, there
from moesaic.align.stages.policy import check_rewards
from moesaic.data.tasks import Split
from moesaic.model.transformer import Model


@dataclass(frozen=True)
class PairStage(Stage):
    records: ClassVar[tuple[str, ...]] = (
        *("pairs_left_out", "pairs_right", "reward_margin", "reward_chosen", "reward_rejected", *RECORDS),
    )

    data: Data = ()
    held_out: Data = ()  # what accuracy is measured on; by default builtin families' test split
    samples: OwnSamples | None = None  # data are prompts, and the model's own completions are compared
    pairs: int = 1000  # taken of each builtin source
    batch_pairs: int = 32  # of a step
    max_length: int = 1024  # tokens of a prompt with its completion; longer pairs are left out
    objective: dict[str, Any] = field(default_factory=dict)  # options of the stage's objective

    def __post_init__(self) -> None:
        sources(self.data, PAIRS) if self.samples is None else sources(self.data)
        if self.held_out:
            sources(self.held_out, PAIRS)
        if min(self.pairs, self.batch_pairs, self.max_length) < 1:
            raise ValueError("pairs, batch_pairs and max_length are at least 1")

    def check(self) -> None:
        named = self.held_out
        if self.samples is None:
            named = (*self.data, *self.held_out)
        else:
            self.samples.check()
            check_rewards(self.samples.rewards, self.data, open_prompts(there(self.data), self.seed))
        self.check_lines(there(named))

    def check_lines(self, data: Data) -> None:
        """Refuse lines that are no pairs."""
        raise NotImplementedError

    def pairs_of(self, model: Model, out: Path) -> tuple[Data, dict[str, float]]:
        """The sources of pairs, and what is to be noted of how they were made."""
        if self.samples is None:
            return self.data, {}
        return self.samples.compared(model, self.data, self.seed, out)

    def held_out_data(self) -> tuple[Data, Split]:
        """What is measured on: what the recipe names, or else other tasks of the same families."""
        if self.held_out or self.samples is not None:
            return self.held_out, "test"
        return tuple(source for source in self.data if source["path"].startswith(BUILTIN)), "test"
