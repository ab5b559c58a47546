"""Seconds and watts of one serving step at one clock: the serving cost model (serving/step.py) under a `ClockModel`.

The batch is padded as engines do it, so time and power grow in steps: a router that knows this avoids the next one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from moesaic.plan.energy.clocks import Draw, Work, clock_model
from moesaic.plan.serving.step import Batch, Serving
from moesaic.serve.energy.control import Load

TILE = 64  # rows the tensor cores compute at least
GRAPH = 8  # CUDA graphs are captured for batches of multiples of this
CONTEXT_GRAIN = 2048  # tokens of context that one priced step stands for


class Pricing:
    """Work of a step by its load: from the serving cost model, once with nothing but compute, once with only memory."""

    def __init__(self, serving: Serving) -> None:
        device = serving.device
        self.model = clock_model(device)
        self._compute = replace(serving, device=replace(device, bandwidth=1e30))
        self._memory = replace(serving, device=replace(device, serve_compute=1e18))
        sustained = device.matmul.get(serving.dtype, device.matmul["default"])
        self._shares = min(1.0, device.serve_compute / sustained), device.serve_memory
        self._works: dict[tuple[str, Load], Work] = {}
        self._draws: dict[tuple[str, Load, float], Draw] = {}

    def decode(self, load: Load, clock: float) -> Draw:
        padded = math.ceil(load.batch / GRAPH) * GRAPH
        return self._draw("decode", Load(padded, math.ceil(load.context / CONTEXT_GRAIN) * CONTEXT_GRAIN), clock)

    def prefill(self, load: Load, clock: float) -> Draw:
        """`load.batch` prompt tokens whose mean attended context is `load.context`."""
        return self._draw("prefill", Load(math.ceil(load.batch / TILE) * TILE, load.context), clock)

    def _draw(self, phase: str, load: Load, clock: float) -> Draw:
        key = (phase, load, clock)
        if key not in self._draws:
            if (phase, load) not in self._works:
                self._works[phase, load] = self._work(phase, load)
            self._draws[key] = self.model.run(self._works[phase, load], clock)
        return self._draws[key]

    def _work(self, phase: str, load: Load) -> Work:
        if phase == "decode":
            context = load.context / load.batch
            computed, moved = Batch(math.ceil(load.batch / TILE) * TILE, context), Batch(load.batch, context)
        else:
            computed = moved = Batch(prompt_tokens=load.batch, prompt_context=load.context)
        compute, memory = self._compute.step(computed), self._memory.step(moved)
        other = memory.parts["launch"] + memory.parts["communication"]
        bandwidth = memory.parts["bandwidth"] + memory.parts["compute"]
        return Work(compute.parts["compute"] + compute.parts["bandwidth"], bandwidth, other, *self._shares)
