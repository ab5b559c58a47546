"""What is asked of a cluster: one training step (how many sequences, how long, how precise, what is recomputed)."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.errors import UserError

RECOMPUTE = ("none", "selective", "full")
OVERLAPS = ("tp", "pp", "dp", "ep")
TRAIN_FORMATS = ("bf16", "fp16", "fp8", "fp4", "fp32")


@dataclass(frozen=True)
class TrainingWork:
    batch: int  # sequences per step, over the whole cluster
    sequence: int
    dtype: str = "bf16"
    recompute: str = "none"
    overlap: frozenset[str] | None = None  # communication hidden behind computation; None: as the device's stack does
    imbalance: float = 1.0  # tokens of the busiest expert rank over the mean
    fused_attention: bool | None = None  # None: as the device's stack does
    schedule: str = "1f1b"  # or "zero-bubble"
    optimizer_bytes: float = 12.0  # per parameter: float32 weights and AdamW's two moments
    gradient_bytes: float = 4.0  # as gradients are accumulated

    def __post_init__(self) -> None:
        for name, value in (("--batch", self.batch), ("--seq", self.sequence)):
            if value < 1:
                raise UserError(name, f"must be a whole number from 1 on, not {value}")
        _one_of("--dtype", self.dtype, TRAIN_FORMATS)
        _one_of("--recompute", self.recompute, RECOMPUTE)
        _one_of("--schedule", self.schedule, ("1f1b", "zero-bubble"))
        for name in self.overlap or ():
            _one_of("--overlap", name, OVERLAPS)
        if not 1 <= self.imbalance < 1000:
            raise UserError("--imbalance", f"is the busiest rank's load over the mean, 1 or more, not {self.imbalance}")

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{name} {value}", "is not known", f"One of {', '.join(known)}.")
