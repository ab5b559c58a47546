"""What an engine has done for rollouts: forward passes, tokens generated, and draft tokens that were accepted."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.serve.core.engine import Engine


@dataclass(frozen=True)
class EngineWork:
    steps: int = 0
    generated: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, engine: Engine) -> EngineWork:
        """Since its start."""
        counts = engine.counts
        return cls(counts.steps, counts.generated_tokens, counts.accepted_tokens)

    def __add__(self, other: EngineWork) -> EngineWork:
        return EngineWork(self.steps + other.steps, self.generated + other.generated, self.accepted + other.accepted)

    def __sub__(self, other: EngineWork) -> EngineWork:
        return EngineWork(self.steps - other.steps, self.generated - other.generated, self.accepted - other.accepted)
