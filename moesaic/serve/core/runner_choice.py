"""What runs an engine's forwards: CUDA graphs where they can, plain blocks elsewhere, and then it is said why."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moesaic.serve.core.forward_pass import Runner

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine

logger = logging.getLogger("moesaic.serve")


def runner_for(engine: Engine) -> Runner:
    """On a machine without a GPU not even the code of graphs is there."""
    if engine.model.device.type == "cuda":
        from moesaic.serve.gpu.overlap import OverlapLoop
        from moesaic.serve.gpu.retained import RetainedLoop

        if RetainedLoop.outside(engine) is None:
            return RetainedLoop(engine)
        reason = OverlapLoop.outside(engine)
        if reason is None:
            return OverlapLoop(engine)
        logger.warning("steps run layer by layer, not as CUDA graphs, because of %s", reason)
    return Runner(engine)
