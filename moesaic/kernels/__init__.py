"""One function per operation of the model, dispatched by device and mode.

`reference` is the meaning of each; the others must agree with it. A model asks once (`choose`) and passes the answer
down, so that nothing here is global and a test can run any implementation on any model.
"""

from __future__ import annotations

from typing import cast

import torch

from moesaic.kernels import cpu, native, reference
from moesaic.kernels.interface import Batch as Batch
from moesaic.kernels.interface import Kernels as Kernels
from moesaic.kernels.interface import Mode as Mode
from moesaic.kernels.native.invariant import InvariantKernels


def choose(device: torch.device | str, mode: Mode = "fast") -> Kernels:
    kind = torch.device(device).type
    if mode != "reference" and kind == "cuda":
        from moesaic.kernels.cuda import fast, invariant  # Triton, which is on machines with a GPU

        return cast(Kernels, invariant if mode == "invariant" else fast)
    if mode == "reference" or kind != "cpu":
        return cast(Kernels, reference)
    compiled = native.kernels()
    if mode == "invariant" and compiled is not None:
        return cast(Kernels, InvariantKernels(compiled))
    return cast(Kernels, compiled or cpu)
