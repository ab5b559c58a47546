"""Rollouts that a critic judges before the policy learns from them; it learns from the same batches, by itself.

Whatever makes the batches, in process or on workers, stands behind it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from moesaic.align.critics.critic import Critic
from moesaic.data.packing import Batch
from moesaic.data.stream import ClosableStream, Stream
from moesaic.phases import phase


class CriticStream:
    def __init__(self, behind: Stream, critic: Critic, steps: int = 0) -> None:
        self.behind, self.critic, self.steps = behind, critic, steps

    @property
    def position(self) -> dict[str, Any]:
        return {"behind": self.behind.position, "critic_steps": self.steps}

    def from_position(self, position: Mapping[str, Any] | None) -> CriticStream:
        if position is None:
            return CriticStream(self.behind.from_position(None), self.critic)
        return CriticStream(self.behind.from_position(position["behind"]), self.critic, position["critic_steps"])

    def skip(self, past: int | Mapping[str, Any]) -> CriticStream:
        assert isinstance(past, Mapping)
        return CriticStream(self.behind.skip(past["behind"]), self.critic, self.steps)

    def __next__(self) -> Batch:
        batch = next(self.behind)
        with phase("critic"):
            batch.notes = batch.notes | self.critic.assess(batch) | self.critic.learn(batch)
        batch.frozen = self.steps < self.critic.options.pretrain  # the policy waits until the critic knows something
        self.steps += 1
        return batch

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.critic.state()

    def restore(self, group: Callable[[str], dict[str, Tensor]]) -> None:
        self.critic.restore(group("critic"), group("critic_optimizer"))

    def close(self) -> None:
        if isinstance(self.behind, ClosableStream):
            self.behind.close()
