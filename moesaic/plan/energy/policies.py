"""By what policy a simulated trace is served: a fixed clock, VoltanaLLM with profiles, or the server's own control."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.plan.energy.control import Control, FixedClock, LatencyPredictor, VoltanaControl
from moesaic.plan.energy.step import Pricing
from moesaic.serve.energy.control import FrequencyControl, Load, Phase, Queued, Slo
from moesaic.serve.energy.routing import Headroom, headroom


@dataclass
class LiveControl:
    """The control of a server's engine (`serve/energy/control.py`), which learns while it serves."""

    phase: Phase
    control: FrequencyControl

    def decode_clock(self, load: Load) -> float:
        return self.control.decode_clock(load)

    def prefill_clock(self, queue: Sequence[Queued]) -> float:
        return self.control.prefill_clock(queue)

    def idle_clock(self, held: float) -> float:
        return self.control.idle_clock(held)

    def observe(self, clock: float, load: Load, seconds: float) -> None:
        self.control.observe(self.phase, clock, load, seconds)

    def room(self, load: Load, prompt: int) -> Headroom:
        return headroom(self.control, load, prompt)


def control_for(
    policy: str | float, phase: Phase, pricing: Pricing, clocks: Sequence[float], slo: Slo, running: int, margin: float
) -> Control:
    """For an instance that does one phase, and runs so many sequences at once."""
    if isinstance(policy, (int, float)):
        return FixedClock(float(policy))
    if policy == "live":
        return LiveControl(phase, FrequencyControl(clocks, slo, running, margin))
    if policy not in {"voltana", "control"}:
        raise UserError(f"policy {policy}", "unknown", "Take live, voltana, control, or a clock in MHz.")
    profile = pricing.decode if phase == "decode" else pricing.prefill
    if phase == "decode":
        batches = sorted({max(1, running * share // 8) for share in range(1, 9)})
        loads = [Load(batch, batch * context) for batch in batches for context in (128, 512, 1024)]
    else:
        loads = [Load(tokens, context) for tokens in (64, 256, 512, 1024, 2048, 4096, 8192) for context in (64, 256)]
    predictor = LatencyPredictor(clocks, loads, profile)
    return VoltanaControl(predictor, pricing.model, profile, slo, running, margin)
