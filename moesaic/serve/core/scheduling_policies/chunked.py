"""Chunked prefill (Sarathi): every step a token budget, one for each decoding request first, the rest for prefill.

    moesaic serve DIR --policy chunked tokens=256

Prompt tokens whose log-probabilities are wanted have a smaller budget (`prompt_logprobs.py`), because whoever comes
next waits for the step to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.serve.core.forward_pass import ForwardPass
from moesaic.serve.core.prompt_logprobs import scored_budget
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
        return self.plan(requests, any(not request.scores_prompt for request in requests))

    def plan(self, requests: Sequence[Request], beside_others: bool) -> Plan:
        left, scored = self.tokens, scored_budget(self.tokens, beside_others)
        plan: Plan = []
        for request in sorted(requests, key=lambda request: (not request.decoding, request.urgency)):
            count = min(request.pending, left, scored if request.scores_prompt else left)
            if count:
                plan.append((request, count))
            left -= count
            scored -= count if request.scores_prompt else 0
        return plan
