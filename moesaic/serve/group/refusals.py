"""What an engine over many ranks does not do, said in words before it starts."""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.scheduling_policies.chunked import Chunked

DRAFTERS = (Suffix, DraftModel)


def check_options(options: dict[str, Any]) -> None:
    if options.get("kv_policy") is not None:
        problem = "prunes keys and values by what all heads attend to, and in a group of ranks no rank has all heads"
        raise UserError("--kv-policy", problem, "Leave it out, or serve without --layout.")
    policy = options.get("policy")
    if policy is not None and not isinstance(policy, Chunked):
        problem = "interrupts forwards between layers, which many ranks cannot do together"
        raise UserError("--policy", problem, "Take chunked, or serve without --layout.")
    for drafter in _each(options.get("drafter")):
        if not isinstance(drafter, DRAFTERS):
            name = type(drafter).__name__
            raise UserError("--drafter", f"{name} cannot draft for a group of ranks", "Take suffix or model.")


def _each(drafter: Drafter | None) -> tuple[Drafter, ...]:
    if isinstance(drafter, DraftRouter):
        return drafter.drafters
    return () if drafter is None else (drafter,)
