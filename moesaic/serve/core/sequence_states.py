"""Layers that keep a state of each sequence (a gated delta rule) beside the pages of the KV cache: what an engine does
not do for them.

A state has taken in all tokens of its sequence in order, and cannot be cut back to fewer of them or put together from
parts. A copy of it may be kept for others with that prefix (`kept_states.py`); nothing of it goes elsewhere.
"""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.model.config import ModelConfig

WHY = "layers of this model keep a state of the whole sequence"


def check_engine(config: ModelConfig, drafter: object | None, kv_policy: object | None, tiers: Any | None) -> None:
    """Refuse at its start what an engine cannot do with such layers."""
    if not config.has_states:
        return
    if drafter is not None:
        problem = f"{WHY}, out of which a rejected draft token cannot be taken"
        raise UserError("--drafter", problem, "Serve this model without drafters.")
    if kv_policy is not None:
        problem = f"{WHY}, which no policy prunes, and few others have keys and values"
        raise UserError("--kv-policy", problem, "Serve this model without --kv-policy.")
    if tiers is not None and (tiers.host_bytes or tiers.disk_bytes or tiers.travel):
        problem = f"{WHY}, and pages say nothing without it"
        raise UserError("--cache-host-gb, --cache-disk-gb, --prefill", problem, "Leave them out.")


def refuse_request(config: ModelConfig, place: str, problem: str) -> None:
    """Of a single request."""
    if config.has_states:
        raise UserError(place, f"{WHY}: {problem}", "Leave it out.")
