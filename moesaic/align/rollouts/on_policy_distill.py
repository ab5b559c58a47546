"""On-policy distillation (GKD): the student samples, and the teacher gives its distribution at every token of that.

It is trained where the student really goes, mistakes included, and not only where a data set went. Sources may have
teachers of their own, and environments to be played in: GLM-5's cross-stage distillation, where each domain is taught
by the stage that learned it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moesaic.align.conversation import Said
from moesaic.align.examples import Mixture, Place
from moesaic.align.rollouts.multi_turn import generate_multi_turn
from moesaic.align.rollouts.pool import StartGroup
from moesaic.align.rollouts.rollout import Sample, generate
from moesaic.align.rollouts.weight_sync import SharedWeights
from moesaic.align.sft import pack_said
from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import seed_of


@dataclass(frozen=True)
class Taught:
    """How a source's prompts are learned from."""

    teacher: int = 0  # its number
    start_group: StartGroup | None = None  # of rollouts in an environment; else a completion is a single turn


class OnPolicyStream:
    """Batches of completions of the engine that holds the student's own weights; every token that it sampled is a
    target. `taught` is one for each source."""

    def __init__(
        self,
        engine: Engine,
        examples: Mixture,
        taught: Sequence[Taught],
        prompts: int,
        sampling: Mapping[str, Any],
        seed: int,
        iteration: int = 0,
    ) -> None:
        self.engine, self.examples, self.taught, self.prompts = engine, examples, taught, prompts
        self.sampling, self.seed, self.iteration = sampling, seed, iteration

    @property
    def position(self) -> dict[str, Any]:
        return {"taken": list(self.examples.taken), "iteration": self.iteration}

    def from_position(self, position: Mapping[str, Any] | None) -> OnPolicyStream:
        position = position or {"taken": [0] * len(self.examples.sources), "iteration": 0}
        examples = self.examples.at(position["taken"])
        given = self.prompts, self.sampling, self.seed, position["iteration"]
        return OnPolicyStream(self.engine, examples, self.taught, *given)

    def skip(self, past: int | Mapping[str, Any]) -> OnPolicyStream:
        assert isinstance(past, Mapping)
        return self.from_position(past)

    def __next__(self) -> Batch:
        SharedWeights(self.engine).push(self.engine.model, self.iteration + 1)
        places = [self.examples.turn() for _ in range(self.prompts)]
        samples = self._sample(places)
        if not any(sample.tokens for sample in samples):
            raise UserError("align.stages", "no completion has a token", "Raise max_tokens.")
        self.iteration += 1
        said = [
            Said([*sample.prompt, *sample.tokens], [False] * len(sample.prompt) + sample.learned) for sample in samples
        ]
        batch = pack_said(said, self.position)
        teachers_S = torch.tensor([self.taught[source].teacher for source, _ in places])
        if any(one.teacher for one in self.taught):
            batch.columns["teacher"] = teachers_S.repeat_interleave(torch.tensor(batch.lengths))
        batch.notes = {"answer_tokens": sum(len(sample.tokens) for sample in samples) / len(samples)}
        return batch

    def _sample(self, places: Sequence[Place]) -> list[Sample]:
        """A completion of each; those of the same kind run together."""
        found: dict[int, Sample] = {}
        for kind in dict.fromkeys(one.start_group for one in self.taught):
            mine = [n for n, (source, _) in enumerate(places) if self.taught[source].start_group is kind]
            examples = [self.examples[places[n]] for n in mine]
            seeds = [seed_of(self.seed, self.iteration, n) for n in mine]
            if kind is None:
                rollouts = generate(self.engine, examples, 1, self.sampling, [], seeds)
            else:
                rollouts = generate_multi_turn(self.engine, examples, kind, [], seeds)
            found |= zip(mine, (group[0] for group in rollouts.groups), strict=True)
        return [found[n] for n in range(len(places))]


def check_teacher(teacher: Path, tokenizer: Tokenizer) -> None:
    """Whether a teacher reads the very tokens the student writes."""
    theirs = Tokenizer.from_files(Checkpoint(teacher).files, teacher)
    if theirs is not None and not theirs.same_tokens(tokenizer):
        remedy = "A teacher must share the student's tokenizer."
        raise UserError(teacher, "has another vocabulary than the model", remedy)
