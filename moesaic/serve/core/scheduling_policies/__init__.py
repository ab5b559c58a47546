"""Scheduling policies, one a file: which requests compute how many tokens in the next step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.request import Request

Plan = list[tuple[Request, int]]


class SchedulingPolicy:
    # Whether it stops forwards between layers: the host then launches no more than a few layers ahead of the device.
    preempts: ClassVar[bool] = False

    def choose(self, requests: Sequence[Request], stopped: Sequence[ForwardPass], now: float) -> Plan | ForwardPass:
        """Some tokens for some of the requests that have any to compute (most urgent first, if pages run short), or a
        stopped forward to resume. An empty plan waits for the next event."""
        raise NotImplementedError

    def interrupts(self, running: ForwardPass, requests: Sequence[Request], now: float) -> bool:
        """Between two layers of a forward: whether something else should come first. Asked only after an arrival, or
        when `next_event` has come."""
        return False

    def next_event(self, running: ForwardPass, requests: Sequence[Request], now: float) -> float:
        """When to ask again although nothing arrived."""
        return float("inf")

    def finished(self, done: ForwardPass) -> None:
        """A forward has finished; `done.seconds` is how long it took."""
