"""What an engine over many ranks does not do, said in words before it starts."""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.serve.core.drafters import Drafter
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.mtp import PredictionLayers
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.drafters.swift import Swift
from moesaic.serve.core.scheduling_policies.chunked import Chunked

DRAFTERS = (Suffix, DraftModel, PredictionLayers, Swift)


def check_options(options: dict[str, Any], predicts: bool = False) -> None:
    """`predicts`: whether the ranks can run multi-token-prediction layers together."""
    check_drafters(options.get("drafter"), predicts)
    if options.get("kv_policy") is not None:
        problem = "prunes keys and values by what all heads attend to, and in a group of ranks no rank has all heads"
        raise UserError("--kv-policy", problem, "Leave it out, or serve without --layout.")
    policy = options.get("policy")
    if policy is not None and not isinstance(policy, Chunked):
        problem = "interrupts forwards between layers, which many ranks cannot do together"
        raise UserError("--policy", problem, "Take chunked, or serve without --layout.")


def check_drafters(drafter: Drafter | None, predicts: bool) -> None:
    """Of a router all that it chose."""
    for each in drafter.drafters if isinstance(drafter, DraftRouter) else () if drafter is None else (drafter,):
        if isinstance(each, PredictionLayers) and not predicts:
            problem = "prediction layers run on tensor ranks alone, not with requests or experts on ranks of their own"
            raise UserError("--drafter mtp", problem, "Take suffix or model, or a layout with dp=1.")
        if not isinstance(each, DRAFTERS):
            remedy = "Take suffix, model, swift or mtp."
            raise UserError("--drafter", f"{type(each).__name__} cannot draft for a group of ranks", remedy)
