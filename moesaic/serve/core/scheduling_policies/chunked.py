"""Chunked prefill (Sarathi): every step a token budget, one for each decoding request first, the rest for prefill.

moesaic serve DIR --policy chunked tokens=256
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.request import Request
from moesaic.serve.core.scheduling_policies import Plan, SchedulingPolicy


@dataclass(frozen=True)
class Chunked(SchedulingPolicy):
    tokens: int = 512  # in one step

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens must be at least 1")

    def choose(self, requests: Sequence[Request], stopped: Sequence[ForwardPass], now: float) -> Plan | ForwardPass:
        if stopped:  # by a pause
            return stopped[0]
        left = self.tokens
        plan: Plan = []
        for request in sorted(requests, key=lambda request: (not request.decoding, request.urgency)):
            if left == 0:
                break
            count = min(request.pending, left)
            plan.append((request, count))
            left -= count
        return plan
