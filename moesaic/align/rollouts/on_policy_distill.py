"""On-policy distillation (GKD): the student samples, and the teacher gives its distribution at every token of that.

It is trained where the student really goes, mistakes included, and not only where a data set went.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesaic.align.conversation import Said
from moesaic.align.examples import Mixture
from moesaic.align.rollouts.rollout import generate
from moesaic.align.rollouts.weight_sync import SharedWeights
from moesaic.align.sft import pack_said
from moesaic.data.packing import Batch
from moesaic.errors import UserError
from moesaic.model.formats.checkpoint import Checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.engine import Engine
from moesaic.worlds.completions import seed_of


class OnPolicyStream:
    """Batches of completions of the engine that holds the student's own weights; every token of them is a target."""

    def __init__(
        self,
        engine: Engine,
        examples: Mixture,
        prompts: int,
        sampling: Mapping[str, Any],
        seed: int,
        iteration: int = 0,
    ) -> None:
        self.engine, self.examples, self.prompts = engine, examples, prompts
        self.sampling, self.seed, self.iteration = sampling, seed, iteration

    @property
    def position(self) -> dict[str, Any]:
        return {"taken": list(self.examples.taken), "iteration": self.iteration}

    def from_position(self, position: Mapping[str, Any] | None) -> OnPolicyStream:
        position = position or {"taken": [0] * len(self.examples.sources), "iteration": 0}
        examples = self.examples.at(position["taken"])
        return OnPolicyStream(self.engine, examples, self.prompts, self.sampling, self.seed, position["iteration"])

    def skip(self, past: int | Mapping[str, Any]) -> OnPolicyStream:
        assert isinstance(past, Mapping)
        return self.from_position(past)

    def __next__(self) -> Batch:
        SharedWeights(self.engine).push(self.engine.model, self.iteration + 1)
        examples = [next(self.examples) for _ in range(self.prompts)]
        seeds = [seed_of(self.seed, self.iteration, number) for number in range(self.prompts)]
        rollouts = generate(self.engine, examples, 1, self.sampling, [], seeds)
        samples = [group[0] for group in rollouts.groups]
        if not any(sample.tokens for sample in samples):
            raise UserError("align.stages", "no completion has a token", "Raise max_tokens.")
        self.iteration += 1
        said = [
            Said([*sample.prompt, *sample.tokens], [False] * len(sample.prompt) + [True] * len(sample.tokens))
            for sample in samples
        ]
        batch = pack_said(said, self.position)
        batch.notes = {"answer_tokens": sum(len(sample.tokens) for sample in samples) / len(samples)}
        return batch


def check_teacher(teacher: Path, tokenizer: Tokenizer) -> None:
    """Whether a teacher reads the very tokens the student writes."""
    theirs = Tokenizer.from_files(Checkpoint(teacher).files, teacher)
    if theirs is not None and not theirs.same_tokens(tokenizer):
        remedy = "A teacher must share the student's tokenizer."
        raise UserError(teacher, "has another vocabulary than the model", remedy)
