"""Pairs of the model's own samples: `data` are prompts then, completions of each are sampled once from the model that
the stage starts from and scored, and the best of a prompt stands against the worst; or, `by: constraint`, for each
constraint of an instruction one that keeps it against one that breaks it.

- {name: reward_model, data: [{path: "builtin:sums"}], samples: {rewards: [{name: task}], prompts: 1200, group: 8}}
- {name: preference, data: [{path: instructions.jsonl}], samples: {rewards: [{name: constraints}], by: constraint}}

RUN/samples holds samples.jsonl, kept.jsonl and pairs.jsonl, written once. Where people compare, their lines are `data`,
and there are no `samples`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from moesaic.align.examples import open_prompts
from moesaic.align.preference.reference import fingerprint
from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.rejection import Rule, collect, key_of
from moesaic.errors import UserError
from moesaic.methods import named
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling

Data = tuple[dict[str, Any], ...]
FOLDER = "samples"
RECORDS = ("sampled_reward", "sampled_right", "questions_answered", "answers_kept", "pairs_made")


@dataclass(frozen=True)
class OwnSamples:
    rewards: tuple[dict[str, Any], ...] = ({"name": "task"},)
    prompts: int = 256
    group: int = 8  # completions of each
    right: float = 1.0  # the score from which on a completion is good; the worse of a pair is not
    margin: float = 0.0  # least distance of the scores of a pair
    by: Literal["score", "constraint"] = "score"  # the best against the worst, or a pair for each constraint
    max_tokens: int = 64
    temperature: float = 1.0

    def __post_init__(self) -> None:
        names = [method.name for method in named(self.rewards)]
        if self.by == "constraint" and names != ["constraints"]:
            raise ValueError("samples: by: constraint wants the one reward constraints, by which they are checked")
        if self.by == "constraint" and self.margin:
            raise ValueError("samples: margin is of scores, and by: constraint compares none")
        if min(self.prompts, self.max_tokens) < 1 or self.group < 2:
            raise ValueError("samples: prompts and max_tokens are at least 1, and group 2: one answer has no worse one")

    def check(self) -> None:
        Sampling(self.max_tokens, self.temperature)

    def compared(self, model: Model, data: Data, seed: int, out: Path) -> tuple[Data, dict[str, float]]:
        """The pairs as a source, and what came of the sampling; sampled anew only by another model or other options."""
        folder = out / FOLDER
        notes = collect(
            Engine(model, max_requests=64, seed=seed),
            open_prompts(data, seed),
            self.prompts,
            self.group,
            {"max_tokens": self.max_tokens, "temperature": self.temperature},
            weighted_rewards(self.rewards),
            Rule(self.right, keep=1, margin=self.margin, by=self.by),
            seed,
            folder,
            key_of(asdict(self), data, seed, fingerprint(model)),
        )
        pairs = folder / "pairs.jsonl"
        if not notes["pairs_made"]:
            problem = f"of no prompt there is a completion that scored {self.right:g} and one that is worse"
            remedy = "Raise prompts or group, or change right."
            if self.by == "constraint":
                problem = "no constraint is kept by one completion and broken by another that keeps no more"
                remedy = "Raise prompts or group."
            raise UserError(f"samples: {folder / 'samples.jsonl'}", problem, remedy)
        return ({"path": str(pairs)},), notes
