"""Requests with a KV policy on a GPU: prompts run layer by layer, as attention is scored there and rows are pruned;
steps of decoding requests alone are CUDA graphs (`kernels/cuda/retained_step.py`).

Steps do not overlap: what a step's tokens are, and where their rows lie, is known before it is launched. Policies that
score the attention of generated tokens (h2o, lethe, fastgen), quantized rows and sliding windows run layer by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moesaic.kernels.cuda.fused_forward import outside
from moesaic.kernels.cuda.retained_step import RetainedBatch, RetainedSteps
from moesaic.kernels.wrapped import WrappedKernels
from moesaic.model.block import Block
from moesaic.model.rope import position_angles
from moesaic.serve.core.draws import draw
from moesaic.serve.core.forward_pass import Chunk, Forward, ForwardPass, Runner, compact_requests
from moesaic.serve.core.kv.compact import CompactRequest
from moesaic.serve.gpu.forward import GraphedForward
from moesaic.serve.gpu.overlap import step_weights

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


class RetainedLoop(Runner):
    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        model, counts, store = engine.model, engine.experts.counts, engine.page_pool.store
        assert store is not None
        rope = position_angles(model.config, engine.max_length, model.device)
        layer_counts = [counts[start:] for start in engine.experts.starts.values()]
        self.steps = RetainedSteps(step_weights(model), store.keys_XC, store.values_XC, rope, counts, layer_counts)
        self.version, self.addresses = engine.version, self._addresses()

    @staticmethod
    def outside(engine: Engine) -> str | None:
        """Why no step is a CUDA graph; None if those of decoding requests are."""
        model, store = engine.model, engine.page_pool.store
        blocks = [block for block in model.layers if isinstance(block, Block)]
        reasons = {
            "no KV cache policy": store is None,
            "the reference kernels": model.mode == "reference",
            "dynamic NTK scaling of RoPE": model.config.rope.kind == "dynamic",
            "layers of a form that the kernels of a step do not know": not all(block.fusible for block in blocks),
            "offloaded layers or experts": any(block._forward_pre_hooks for block in model.layers),
            "kernels that stand in for plain ones": isinstance(model.ops, WrappedKernels),
            "layers with sliding windows": store is not None and store.windows.any,
            "quantized rows": store is not None and store.policy.encoding is not None,
            "a drafter": engine.drafter is not None,
        }
        return next((name for name, holds in reasons.items() if holds), None) or outside(step_weights(model))

    def run(self, work: list[Chunk] | ForwardPass) -> Forward | None:
        if not (isinstance(work, list) and work and all(takes(chunk) for chunk in work)):
            return super().run(work)
        engine, start = self.engine, self.engine.clock()
        if self.version != engine.version:  # those that were changed in place are read by the next step
            before, self.addresses = self.addresses, self._addresses()
            if before != self.addresses:
                self.steps.move_weights(step_weights(engine.model))
            self.version = engine.version
        forward = GraphedForward(work, engine, self.steps.launch(batch_of(work)))
        forward.seconds = engine.clock() - start
        engine.counts.busy_seconds += forward.seconds
        return forward

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in self.engine.model.parameters())


def takes(chunk: Chunk) -> bool:
    """One token that is sampled, of a request whose attention nobody scores any more."""
    request, compact = chunk.request, chunk.request.compact
    if compact is None or chunk.rows != 1 or not chunk.last or request.adapter is not None or request.embed:
        return False
    return compact.scored_from > compact.computed and compact.computed >= compact.prompt


def batch_of(chunks: list[Chunk]) -> RetainedBatch:
    requests = [chunk.request for chunk in chunks]
    found = compact_requests(chunks)
    return RetainedBatch(
        np.array([chunk.new_tokens()[0] for chunk in chunks], np.int32),
        np.array([request.computed for request in requests], np.int32),
        np.array([table_of(compact) for compact in found], np.int64),
        np.stack([compact.counts_LN.numpy() for compact in found]).astype(np.int32),
        np.array([request.sampling.temperature for request in requests], np.float32),
        np.array([draw(request.seed, request.computed + 1) for request in requests], np.float64),
    )


def table_of(compact: CompactRequest) -> tuple[int, int, int]:
    """Where its table of rows lies, the width of that, and how many columns are in use."""
    rows_LNM = compact.rows_LNM
    return rows_LNM.data_ptr(), rows_LNM.stride(1), compact.columns
