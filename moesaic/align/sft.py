"""Supervised fine-tuning: conversations packed without padding, the loss on what the assistant said.

AgentTuning's mix of trajectories (with tools and their results) and general instructions is two weighted sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moesaic.align.conversation import Said, read_written, write_conversation
from moesaic.align.examples import Mixture
from moesaic.data.packing import IGNORED, Batch
from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer

AHEAD = 64  # conversations that are read together


class ConversationStream:
    """Batches of whole conversations of about `batch_tokens`; those longer than `longest` are left out, and counted."""

    def __init__(self, tokenizer: Tokenizer, examples: Mixture, batch_tokens: int, longest: int) -> None:
        self.tokenizer, self.examples = tokenizer, examples
        self.batch_tokens, self.longest = batch_tokens, longest
        self.left_out = 0
        self.taken = list(examples.taken)  # with the latest conversation in a batch; the examples are ahead of that
        self._ahead: deque[tuple[list[Said], list[int]]] = deque()

    @property
    def position(self) -> dict[str, Any]:
        return {"taken": list(self.taken), "left_out": self.left_out}

    def from_position(self, position: Mapping[str, Any] | None) -> ConversationStream:
        taken = position["taken"] if position else [0] * len(self.examples.sources)
        stream = ConversationStream(self.tokenizer, self.examples.at(taken), self.batch_tokens, self.longest)
        stream.left_out = position["left_out"] if position else 0
        return stream

    def skip(self, past: int | Mapping[str, Any]) -> ConversationStream:
        """A bad batch is behind the position it was reached with."""
        assert isinstance(past, Mapping)
        return self.from_position(past)

    def __next__(self) -> Batch:
        said: list[Said] = []
        tokens = missed = 0
        while tokens < self.batch_tokens:
            if not self._ahead:
                self._read()
            parts, self.taken = self._ahead.popleft()
            for part in parts:
                if len(part.tokens) > self.longest:
                    self.left_out += 1
                    missed += 1
                    if missed > 1000:
                        problem = f"no conversation is as short as {self.longest} tokens"
                        raise UserError("align.stages", problem, "Raise the stage's longest.")
                    continue
                said.append(part)
                tokens += len(part.tokens)
        return pack_said(said, self.position)

    def _read(self) -> None:
        written, taken = [], []
        for _ in range(AHEAD):
            example = next(self.examples)
            written.append(write_conversation(self.tokenizer, example.conversation(), example.facts.get("tools")))
            taken.append(list(self.examples.taken))
        said = iter(read_written(self.tokenizer, [one for parts in written for one in parts]))
        self._ahead.extend(([next(said) for _ in parts], place) for parts, place in zip(written, taken, strict=True))


def pack_said(said: Sequence[Said], position: dict[str, Any]) -> Batch:
    """Conversations laid end to end; targets only where the next token was the assistant's."""
    targets = [
        token if learn else IGNORED
        for part in said
        for token, learn in zip([*part.tokens[1:], 0], [*part.learn[1:], False])
    ]
    return Batch(
        torch.tensor([token for part in said for token in part.tokens]),
        torch.tensor(targets),
        [len(part.tokens) for part in said],
        [0] * len(said),
        max(1, sum(target != IGNORED for target in targets)),
        position,
    )
