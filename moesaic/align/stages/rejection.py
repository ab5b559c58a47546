"""Rejection-sampling fine-tuning (ChatGLM-Math): completions of the model itself, scored; SFT on the good ones.

align:
  stages:
    - {name: rejection, data: [{path: "builtin:chain_sum"}], rewards: [{name: task}], prompts: 200, group: 8}
    - {name: preference, data: [{path: "stage:1/rejection/pairs.jsonl"}]}

The paper's critic is one of the rewards: `critique` (any model behind a URL, also this one) or `model`. The second
stage learns from the same samples, the best completion of a prompt against the worst.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from moesaic.align.accuracy import Accuracy
from moesaic.align.examples import FileExamples, Mixture, open_prompts
from moesaic.align.preference.own_samples import RECORDS
from moesaic.align.preference.reference import fingerprint
from moesaic.align.rewards import weighted_rewards
from moesaic.align.rollouts.rejection import Rule, collect, key_of
from moesaic.align.sft import ConversationStream
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.align.stages.policy import check_rewards
from moesaic.data.packing import Batch
from moesaic.data.stream import Stream
from moesaic.methods import Method, named
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling


@dataclass(frozen=True)
class Rejection(Stage):
    records: ClassVar[tuple[str, ...]] = RECORDS

    data: Data = ()
    rewards: tuple[dict[str, Any], ...] = ({"name": "task"},)
    prompts: int = 256
    group: int = 8  # completions of each
    right: float = 1.0  # the score from which on a completion is good
    keep: int = 4  # good completions of a prompt that are trained on, at most
    margin: float = 0.0  # least distance of the scores of a pair
    diverse: float = 1.0  # share of the good completions that is trained on, those that are least alike
    max_tokens: int = 64
    temperature: float = 1.0
    batch_tokens: int = 4096
    max_length: int = 1024

    def __post_init__(self) -> None:
        sources(self.data)
        named(self.rewards)
        if min(self.prompts, self.group, self.keep, self.max_tokens, self.batch_tokens, self.max_length) < 1:
            raise ValueError("prompts, group, keep, max_tokens, batch_tokens and max_length are at least 1")
        if not 0 < self.diverse <= 1:
            raise ValueError("diverse is a share above 0")

    def check(self) -> None:
        check_rewards(self.rewards, self.data, open_prompts(there(self.data), self.seed))
        Sampling(self.max_tokens, self.temperature)

    def objective_method(self) -> Method:
        return Method("next_token")

    def open(self, model: Model, out: Path, world: World | None = None) -> Stream:
        assert model.tokenizer is not None
        folder = out / "rejection"
        options = {name: value for name, value in asdict(self).items() if name not in ("steps", "lr", "save_every")}
        notes = collect(
            Engine(model, max_requests=64, seed=self.seed),
            open_prompts(self.data, self.seed),
            self.prompts,
            self.group,
            {"max_tokens": self.max_tokens, "temperature": self.temperature},
            weighted_rewards(self.rewards),
            Rule(self.right, self.keep, self.margin, self.diverse),
            self.seed,
            folder,
            key_of(options, fingerprint(model)),
        )
        kept = Mixture([FileExamples(folder / "kept.jsonl", self.seed)], [1.0])
        max_length = min(self.max_length, model.config.context)
        return NotedConversations(model.tokenizer, kept, self.batch_tokens, max_length, notes)

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of(self.data, self.evaluate, self.max_tokens)

    def measures(self) -> tuple[str, ...]:
        return Accuracy.names(self.data, self.evaluate)


class NotedConversations(ConversationStream):
    """With what came of the sampling in every step's record."""

    def __init__(self, *given: Any) -> None:
        *conversations, self.notes = given
        super().__init__(*conversations)

    def from_position(self, position: Any) -> NotedConversations:
        plain = super().from_position(position)
        made = NotedConversations(self.tokenizer, plain.examples, self.batch_tokens, self.max_length, self.notes)
        made.left_out = plain.left_out
        return made

    def __next__(self) -> Batch:
        batch = super().__next__()
        batch.notes = batch.notes | self.notes
        return batch
