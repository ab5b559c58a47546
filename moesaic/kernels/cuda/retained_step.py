"""A decode step of compact requests (KV policies) as one CUDA graph: every head attends to the rows it has retained.

    steps = RetainedSteps(weights, keys_XC, values_XC, rope, counts, layer_counts)
    launched = steps.launch(batch)          as GraphedSteps.launch; the new tokens' rows must have been allocated

A graph is captured for so many requests (filled up with none) and up to so many rows of a head. Rows may be pruned,
packed and reallocated between two steps: the graph is told each time where a request's table of rows lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.cuda.fused_forward import FusedForward, StepWeights
from moesaic.kernels.cuda.graphed_step import LaunchedStep, no_collection
from moesaic.kernels.interface import KVCache, RopeAngles
from moesaic.kernels.layer_weights import GroupedQueryWeights
from moesaic.kernels.triton.attention.paged import attend
from moesaic.kernels.triton.attention.paged_rows import Rows
from moesaic.kernels.triton.attention.qk_norm_rope_cache import qk_norm_rope_into_cache
from moesaic.kernels.triton.attention.retained_rows import gather, store
from moesaic.kernels.triton.sample import sample

ROWS = 512  # the rows of a head are counted in multiples of this, at least, of an eighth of them where they are many


@dataclass
class RetainedBatch:
    """One new token of every request, on the host."""

    tokens_T: np.ndarray
    positions_T: np.ndarray
    tables_T3: np.ndarray  # int64: where a request's table of rows lies, its width, how many columns are in use
    counts_TLN: np.ndarray  # of rows, the new one among them
    temperatures_T: np.ndarray
    draws_T: np.ndarray


class RetainedForward(FusedForward):
    """`keys_XC` and `values_XC` are the cache's rows, of all layers and heads; of each layer `caches` has the list of
    those that are attended to, as the step that runs has gathered them."""

    def __init__(
        self, weights: StepWeights, keys_XC: Tensor, values_XC: Tensor, rope: RopeAngles, counts: list[Tensor]
    ) -> None:
        self.lists: list[KVCache] = [{} for _ in weights.layers]
        super().__init__(weights, self.lists, rope, counts)
        self.keys_XC, self.values_XC = keys_XC, values_XC

    def grouped_query(self, part: GroupedQueryWeights, h_TD: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        qkv_TX, norm = self.projected(part, h_TD, rows)
        T, H, N, C = len(h_TD), part.heads, part.kv_heads, self.keys_XC.shape[1]
        own = {name: qkv_TX.new_empty(1, T, N, C) for name in ("keys", "values")}  # a cache that is all one page
        angles_T, at = rows.positions_T.clamp(min=0), in_one_page(torch.arange(T, device=h_TD.device), T)
        q_THC = qk_norm_rope_into_cache(qkv_TX, norm, self.rope, angles_T, at, own, H, N)
        store(own["keys"], own["values"], cache["newest"], self.keys_XC, self.values_XC)
        # A token's key head is a token of its own here, with as many query heads as share that key head.
        keys, values = (x_XC[None, :, None] for x_XC in (self.keys_XC, self.values_XC))
        pairs = in_one_page(cache["positions"], cache["chosen"].shape[1])
        out_XGC = attend(q_THC.view(T * N, H // N, C), keys, values, pairs, part.scale, chosen_TK=cache["chosen"])
        return self.linear(out_XGC.view(T, H * C), part.out, rows)


def in_one_page(positions_X: Tensor, longest: int) -> Rows:
    """Tokens that are a tile each, in a cache that is one page."""
    zeros_X = torch.zeros_like(positions_X, dtype=torch.int32)
    tiles_X2 = torch.stack([torch.arange(len(zeros_X), device=zeros_X.device), torch.ones_like(zeros_X)], dim=1)
    return Rows(
        positions_X.int(), zeros_X, zeros_X[:1, None], longest, decode_X2=tiles_X2.int(), read_before_wait=False
    )


@dataclass
class Captured:
    graph: Any
    inputs: dict[str, Tensor]
    outputs: tuple[Tensor, Tensor, Tensor, Tensor]  # hidden states, logits, routes, results


class RetainedSteps:
    def __init__(
        self,
        weights: StepWeights,
        keys_XC: Tensor,
        values_XC: Tensor,
        rope: RopeAngles,
        counts: Tensor,
        layer_counts: list[Tensor],
    ) -> None:
        self.forward = RetainedForward(weights, keys_XC, values_XC, rope, layer_counts)
        self.counts, self.device = counts, keys_XC.device
        self.graphs: dict[tuple[int, int], Captured] = {}
        self.pool: Any = None
        self.real = self.device.type == "cuda"  # elsewhere, in tests, steps run as they come
        self.stream = torch.cuda.Stream() if self.real else None

    def move_weights(self, weights: StepWeights) -> None:
        self.forward.weights = weights
        self.graphs.clear()
        self.pool = None

    def launch(self, batch: RetainedBatch) -> LaunchedStep:
        count = len(batch.tokens_T)
        shape = padded(count), rounded(int(batch.counts_TLN.max()))
        inputs = filled_up(batch, shape[0])
        captured = self.graphs.get(shape)
        if captured is None:
            captured = self.graphs[shape] = self.capture(inputs, shape[1])
        for name, given in inputs.items():
            captured.inputs[name].copy_(given)
        if captured.graph is not None:
            captured.graph.replay()
            outputs = captured.outputs
        else:
            outputs = self.step(captured.inputs, shape[1])
        hidden_TD, logits_RV, routes_LTK, results_3R = outputs
        results = results_3R[:, :count].cpu().numpy()
        return LaunchedStep(hidden_TD[:count], logits_RV[:count], routes_LTK[:, :count], results, None)

    def capture(self, given: dict[str, Tensor], most: int) -> Captured:
        inputs = {name: tensor.to(self.device) for name, tensor in given.items()}
        before = self.counts.clone()
        outputs = self.step(inputs, most)  # compiles everything; what it writes to the cache is written once more
        self.counts.copy_(before)
        if not self.real:
            return Captured(None, inputs, outputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.stream(self.stream):
            graph.capture_begin(*([] if self.pool is None else [self.pool]))
            try:
                outputs = self.step(inputs, most)
            finally:
                graph.capture_end()
        self.pool = self.pool or graph.pool()
        return Captured(graph, inputs, outputs)

    def step(self, inputs: dict[str, Tensor], most: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        forward, T = self.forward, len(inputs["tokens"])
        lists = gather(inputs["tables"], inputs["counts"], most)
        for cache, chosen_XK, positions_X, newest_X in zip(forward.lists, *lists, strict=True):
            cache.update(chosen=chosen_XK, positions=positions_X, newest=newest_X)
        nowhere_T = torch.full((T,), -1, dtype=torch.int32, device=self.device)
        unused_S = torch.zeros(1, dtype=torch.int32, device=self.device)
        routes_LTK = forward.new_routes(T)
        x_TD = forward.embed(inputs["tokens"], torch.zeros_like(nowhere_T), unused_S)
        rows = in_one_page(inputs["positions"], most)
        hidden_TD = forward(x_TD, rows, routes_LTK)
        logits_TV = forward.logits(hidden_TD)
        results_3T = sample(logits_TV, inputs["temperatures"], inputs["draws"], nowhere_T, unused_S)
        return hidden_TD, logits_TV, routes_LTK, results_3T


def filled_up(batch: RetainedBatch, size: int) -> dict[str, Tensor]:
    """With tokens that are none: no rows to attend to, none to write to, no experts."""
    T, L, N = batch.counts_TLN.shape
    given: dict[str, np.ndarray] = {
        "tokens": np.zeros(size, np.int32),
        "positions": np.full(size, -1, np.int32),
        "tables": np.zeros((size, 3), np.int64),
        "counts": np.zeros((size, L, N), np.int32),
        "temperatures": np.zeros(size, np.float32),
        "draws": np.zeros(size, np.float64),
    }
    given["tables"][:] = batch.tables_T3[:1]  # an address there is
    for name, own in zip(given, vars(batch).values(), strict=True):
        given[name][:T] = own
    return {name: torch.from_numpy(array) for name, array in given.items()}


def padded(requests: int) -> int:
    """Graphs are captured for 1, 2, 4, 8 requests, then multiples of 8, then of 32."""
    if requests <= 8:
        return 1 << (requests - 1).bit_length()
    step = 8 if requests <= 64 else 32
    return -(-requests // step) * step


def rounded(rows: int) -> int:
    step = max(ROWS, 1 << max(0, rows.bit_length() - 3))
    return -(-rows // step) * step
