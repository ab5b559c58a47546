"""Supervised fine-tuning on conversations; loss on the assistant's tokens.

align: {stages: [{name: sft, steps: 200, data: [{path: chats.jsonl}], batch_tokens: 4096}]}

With `forks: true` structured answers are taken apart: the model learns to write them in parallel (`align/forks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from moesaic.align.accuracy import Accuracy
from moesaic.align.examples import open_conversations
from moesaic.align.forks import child_token
from moesaic.align.sft import ConversationStream
from moesaic.align.stages import Data, Measure, Stage, sources, there
from moesaic.data.stream import Stream
from moesaic.kernels import hardware
from moesaic.methods import Method
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.train.ranks import check_batch


@dataclass(frozen=True)
class Sft(Stage):
    on_ranks: ClassVar[bool] = True

    data: Data = ()
    batch_tokens: int = 4096
    max_length: int = 1024
    max_tokens: int = 64  # of a completion, where accuracy is measured
    forks: bool = False  # APAR: lists and paragraphs as branches

    def __post_init__(self) -> None:
        sources(self.data)
        if min(self.batch_tokens, self.max_length, self.max_tokens) < 1:
            raise ValueError("batch_tokens, max_length and max_tokens are at least 1")

    def check(self) -> None:
        open_conversations(there(self.data), self.seed)

    def check_ranks(self, layout: ParallelLayout, accumulate: int, context: int, key: str) -> None:
        check_batch(layout, accumulate, self.batch_tokens, min(self.max_length, context), f"{key}.batch_tokens")

    def objective_method(self) -> Method:
        return Method("next_token")

    def stream(self, model: Model) -> Stream:
        assert model.tokenizer is not None
        if self.forks:
            child_token(model.tokenizer)  # before anything is read
        max_length = min(self.max_length, model.config.context)
        examples = open_conversations(self.data, self.seed)
        readers = min(4, hardware.threads() // 4) if model.device.type == "cuda" else 0  # a CPU is busy with learning
        return ConversationStream(model.tokenizer, examples, self.batch_tokens, max_length, readers, self.forks)

    def measure(self, model: Model) -> Measure | None:
        return Accuracy.of(self.data, self.evaluate, self.max_tokens)

    def measures(self) -> tuple[str, ...]:
        return Accuracy.names(self.data, self.evaluate)
