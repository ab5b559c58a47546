"""SFT replay (ChatGLM-RLHF's guard against forgetting): conversations trained on in the same steps as the rollouts.

replay_sft: {data: [{path: chats.jsonl}], weight: 0.1, batch_tokens: 1024}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import AliasChoices, Field
from torch import Tensor

from moesaic.align.sft import ConversationStream
from moesaic.align.stages import Data, sources
from moesaic.data.packing import IGNORED, Batch, GroupedBatch
from moesaic.data.stream import ClosableStream, StatefulStream, Stream


@dataclass(frozen=True)
class ReplaySftOptions:
    data: Data = ()
    weight: float = 0.1  # of the conversations' loss per token
    batch_tokens: int = 1024
    max_length: Annotated[int, Field(validation_alias=AliasChoices("max_length", "longest"))] = 1024

    def __post_init__(self) -> None:
        sources(self.data)
        if not self.weight > 0 or min(self.batch_tokens, self.max_length) < 1:
            raise ValueError("replay_sft: weight is above 0, batch_tokens and max_length are at least 1")


class ReplaySftStream:
    """Batches of a policy with conversations laid behind the rollouts; `remember` says how much each of their tokens
    counts, and their policy weight is none."""

    def __init__(self, behind: Stream, conversations: ConversationStream, weight: float) -> None:
        self.behind, self.conversations, self.weight = behind, conversations, weight

    @property
    def position(self) -> dict[str, Any]:
        return {"behind": self.behind.position, "conversations": self.conversations.position}

    def from_position(self, position: Mapping[str, Any] | None) -> ReplaySftStream:
        here: Mapping[str, Any] = position or {}
        behind = self.behind.from_position(here.get("behind"))
        return ReplaySftStream(behind, self.conversations.from_position(here.get("conversations")), self.weight)

    def skip(self, past: int | Mapping[str, Any]) -> ReplaySftStream:
        assert isinstance(past, Mapping)
        conversations = self.conversations.from_position(past["conversations"])
        return ReplaySftStream(self.behind.skip(past["behind"]), conversations, self.weight)

    def __next__(self) -> Batch:
        batch, more = next(self.behind), next(self.conversations)
        columns = {}
        for name, column_T in batch.columns.items():
            if name.startswith("routes/"):  # any experts: nobody routed these tokens before
                filler_T = torch.arange(column_T.shape[1]).expand(len(more.tokens_T), -1)
            else:
                filler_T = column_T.new_zeros(len(more.tokens_T), *column_T.shape[1:])
            columns[name] = torch.cat([column_T, filler_T])
        learned_T = (more.targets_T != IGNORED).float() * (self.weight / more.count)
        columns["remember"] = torch.cat([torch.zeros(len(batch.tokens_T)), learned_T])
        batch.tokens_T = torch.cat([batch.tokens_T, more.tokens_T])
        batch.targets_T = torch.cat([batch.targets_T, more.targets_T])
        batch.lengths, batch.domains = batch.lengths + more.lengths, batch.domains + more.domains
        if isinstance(batch, GroupedBatch):
            batch.groups = batch.groups + [1] * len(more.lengths)
        batch.columns = columns
        return batch

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.behind.state() if isinstance(self.behind, StatefulStream) else {}

    def restore(self, group: Callable[[str], dict[str, Tensor]]) -> None:
        if isinstance(self.behind, StatefulStream):
            self.behind.restore(group)

    def close(self) -> None:
        if isinstance(self.behind, ClosableStream):
            self.behind.close()
