"""torch.compile of single blocks on a GPU: fuses norms, RoPE and the router; not attention and experts.

All blocks share what is compiled, and only another batch shape recompiles it, so this is for runs whose batches are all
of one size.
"""

from __future__ import annotations

from typing import Any

import torch

from moesaic.model.transformer import Model

# A block is compiled in pieces around what the compiler leaves out; where a piece knows its layer, once for each.
PIECES = 8


def compile_blocks(model: Model) -> None:
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, PIECES * len(model.layers))
    for block in model.layers:
        block.compile(dynamic=False)
