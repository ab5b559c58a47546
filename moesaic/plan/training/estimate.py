"""The answer for one training layout: time, MFU, memory, money, energy, what bounds it, and how wrong it may be."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout, check_sizes, nearest_divisor
from moesaic.plan.hardware import Cluster
from moesaic.plan.shape import ModelShape
from moesaic.plan.training.expected_error import expected_error
from moesaic.plan.training.memory import TrainingMemory, training_memory
from moesaic.plan.training.step_time import StepTime, sequences_per_rank, step_time
from moesaic.plan.training.workload import TrainingWork

USABLE = 0.96  # of device memory: what the driver and others keep


@dataclass(frozen=True)
class TrainingPlan:
    model: ModelShape
    cluster: Cluster
    layout: ParallelLayout
    work: TrainingWork
    step: StepTime
    memory: TrainingMemory

    @property
    def fits(self) -> bool:
        return self.memory.total <= USABLE * self.cluster.device.memory_bytes

    @property
    def used(self) -> int:
        return self.layout.devices

    @property
    def tokens_per_second(self) -> float:
        return self.work.tokens / self.step.seconds

    @property
    def mfu(self) -> float:
        flops = self.model.training_flops(self.work.tokens, self.work.sequence)
        return flops / (self.step.seconds * self.used * self.cluster.device.peak("bf16"))

    def bound_by(self) -> str:
        """The largest part of the step that is not matmuls running at their rate."""
        step = self.step
        shares = {f"exposed {kind} communication": seconds for kind, seconds in step.exposed.items()}
        shares |= {"pipeline bubble": step.bubble, "attention": step.parts["attention"]}
        shares |= {
            "elementwise work and waiting for the host": step.parts["elementwise"],
            "the optimizer": step.optimizer,
        }
        return max(shares, key=shares.__getitem__)

    def brief(self) -> dict[str, Any]:
        """One line of a search's runners-up."""
        return {
            "layout": str(self.layout),
            "recompute": self.work.recompute,
            "step_seconds": self.step.seconds,
            "memory_bytes": self.memory.total,
            "bound_by": self.bound_by(),
        }

    def as_json(self) -> dict[str, Any]:
        step, device = self.step, self.cluster.device
        error = expected_error(self.model, device)
        dollars = device.price * self.cluster.count / 3600
        busy = step.compute / step.seconds
        watts = device.idle_power + (device.power - device.idle_power) * min(1.0, busy)
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "active_parameters": self.model.active_parameters,
            "cluster": self.cluster.name,
            "layout": str(self.layout),
            "parallel": asdict(self.layout),
            "devices_used": self.used,
            "micro_batch": step.micro_batch,
            "micro_batches": step.micro_batches,
            "step_seconds": step.seconds,
            "mfu": self.mfu,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_per_gpu": self.tokens_per_second / self.used,
            "memory_bytes": self.memory.parts(),
            "memory_limit_bytes": device.memory_bytes,
            "fits": self.fits,
            "bubble": step.bubble / step.seconds,
            "exposed_communication": step.exposed_communication / step.seconds,
            "seconds": {
                **{name: seconds for name, seconds in step.parts.items()},
                **{f"exposed_{kind}": seconds for kind, seconds in step.exposed.items()},
                "bubble": step.bubble,
                "optimizer": step.optimizer,
                "overhead": step.overhead,
            },
            "bound_by": self.bound_by(),
            "dollars_per_step": dollars * step.seconds,
            "dollars_per_billion_tokens": dollars * 1e9 / self.tokens_per_second,
            "joules_per_token": watts * self.used / self.tokens_per_second,
            "expected_error": error.share,
            "expected_error_basis": f"{error.runs} published runs of {error.kind}: median {error.median:.1%}",
            "recompute": self.work.recompute,
            "dtype": self.work.dtype,
            "batch": self.work.batch,
            "sequence": self.work.sequence,
        }


def plan_training(model: ModelShape, cluster: Cluster, layout: ParallelLayout, work: TrainingWork) -> TrainingPlan:
    check_layout(model, layout, work)
    step = step_time(model, cluster, layout, work)
    memory = training_memory(model, layout, work, step.micro_batch, step.micro_batches)
    return TrainingPlan(model, cluster, replace(layout, mb=step.micro_batch), work, step, memory)


def check_layout(model: ModelShape, layout: ParallelLayout, work: TrainingWork) -> None:
    """Refuse what cannot be divided so, with the nearest division that works."""
    heads = {layer.attention.heads for layer in model.layers}
    experts = {model.experts} - {0}
    check_sizes(layout, model.name, heads=heads, experts=experts, layers=len(model.layers))
    if work.sequence % layout.cp:
        raise UserError(
            f"--layout: cp={layout.cp}",
            f"does not divide sequences of {work.sequence} tokens",
            f"Nearest that works: cp={nearest_divisor(layout.cp, work.sequence)}.",
        )
    sequences_per_rank(layout, work)
