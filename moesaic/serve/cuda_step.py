"""Serving on a GPU with few kernels and no waiting: a fused forward, and whole decode steps as CUDA graphs.

    step = DecodeStep(model, cache, sequences=512, longest=4096)
    hidden_TD = step.forward(tokens_T, layout)                  prompts, any layout over the same cache
    step.begin(row, token, place, pages, temperature, seed)     a sequence's last token, and where it stands
    step.run(rows).wait()                                       one more token for each of the first rows

A step feeds itself: the token it chose is the next one's input, on the device, so that steps can be queued before the
host has seen what came out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.kernels import cuda
from moesaic.kernels.triton.layer import experts
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.norm import add_and_norm, heads, rms_norm
from moesaic.kernels.triton.paged_attention import SPLIT, attend
from moesaic.kernels.triton.paged_rows import Rows
from moesaic.kernels.triton.router import route
from moesaic.kernels.triton.sample import sample
from moesaic.model.attention import GroupedQueryAttention
from moesaic.model.block import Block
from moesaic.model.config import GroupedQuery
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward
from moesaic.model.layout import Layout, PagedCache
from moesaic.model.linear import Linear, Norm
from moesaic.model.rope import frequencies
from moesaic.model.transformer import Model

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def takes(model: Model) -> bool:
    """Whether a model is of the kind the fused forward is written for; others run as plain blocks."""

    def plain(block: nn.Module) -> bool:
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        linears = [part for part in block.modules() if isinstance(part, Linear)]
        return (
            isinstance(attention, GroupedQueryAttention)
            and block.attention_post_norm is None
            and all(type(part) is Linear for part in linears)
            and (isinstance(ffn, DenseFeedForward) or (ffn.shared is None and ffn.router.shape.groups == 1))
            and model.config.activation == "silu"
        )

    return model.device.type == "cuda" and model.config.rope.kind != "dynamic" and all(map(plain, model.layers))


@dataclass(frozen=True)
class Chosen:
    """What one step chose: on its way to the host, there after `wait`."""

    tokens_S: Tensor
    logprobs_S: Tensor
    there: torch.cuda.Event

    def wait(self) -> tuple[list[int], list[float]]:
        self.there.synchronize()
        return self.tokens_S.tolist(), self.logprobs_S.tolist()


class FusedForward:
    """The forward of `Model`, with the small operations joined; the cache must be of the model's own format."""

    def __init__(self, model: Model, cache: PagedCache, longest: int) -> None:
        assert takes(model), "a model of another kind"
        self.model, self.cache = model, cache
        speed_R, factor = frequencies(model.config.rope, model.config.context, model.device)
        angle_PR = torch.arange(longest, device=model.device)[:, None].float() * speed_R
        self.cos_PR, self.sin_PR = angle_PR.cos() * factor, angle_PR.sin() * factor

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, rows: Rows) -> Tensor:
        """Each half of a block leaves what is to be added to the stream; the norm after it adds it."""
        x_TD, more_TD = F.embedding(tokens_T, self.model.embed), None
        for number, block in enumerate(self.model.layers):
            assert isinstance(block, Block)
            x_TD, h_TD = self.normed(x_TD, more_TD, block.attention_norm)
            more_TD = self.attention(block, h_TD, positions_T, rows, self.cache.layers[number])
            x_TD, more_TD = self.feed_forward(block, x_TD, more_TD)
        return self.normed(x_TD, more_TD, self.model.norm)[1]

    def normed(self, x_TD: Tensor, more_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        if more_TD is None:
            return x_TD, rms_norm(x_TD, norm.weight, norm.eps)
        return add_and_norm(x_TD, more_TD, norm.weight, norm.eps)

    def attention(
        self, block: Block, h_TD: Tensor, positions_T: Tensor, rows: Rows, slabs: dict[str, Tensor]
    ) -> Tensor:
        part = block.attention
        assert isinstance(part, GroupedQueryAttention)
        qkv_TX = linear(h_TD, part.qkv.weight, part.qkv.bias)
        norms = None
        if part.q_norm is not None and part.k_norm is not None:
            norms = (part.q_norm.weight, part.k_norm.weight, part.q_norm.eps)
        angles = (self.cos_PR, self.sin_PR, positions_T)
        q_THC = heads(qkv_TX, norms, angles, part.interleaved, rows, slabs, part.heads, part.kv_heads)
        out_THC = attend(q_THC, slabs["keys"], slabs["values"], rows, part.scale, part.window)
        return linear(out_THC.flatten(1), part.out.weight, part.out.bias)

    def feed_forward(self, block: Block, x_TD: Tensor, more_TD: Tensor) -> tuple[Tensor, Tensor]:
        part, norm = block.ffn, block.ffn_norm
        x_TD, h_TD = add_and_norm(x_TD, more_TD, norm.weight, norm.eps)
        if isinstance(part, MixtureFeedForward):
            router, shape = part.router, part.router.shape
            routes_TK, weights_TK = route(
                h_TD, router.weight, router.correction, shape.per_token, shape.score == "sigmoid", shape.normalize,
                shape.scale,
            )  # fmt: skip
            return x_TD, experts(h_TD, routes_TK, weights_TK, part.gate_up_EGD, part.down_EDF)
        hidden_TF = cuda.gated(linear(h_TD, part.gate_up.weight, part.gate_up.bias), "silu")
        return x_TD, linear(hidden_TF, part.down.weight, part.down.bias)


class DecodeStep:
    """One token for each of up to `sequences` sequences, none longer than `longest`, in one graph replay."""

    def __init__(self, model: Model, cache: PagedCache, sequences: int = 512, longest: int | None = None) -> None:
        longest = min(longest or model.config.context, cache.pages * cache.page_size)
        self.model, self.cache, self.longest = model, cache, longest
        self.fused = FusedForward(model, cache, longest)
        device = model.device
        self.tokens_S = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.places_S = torch.full((sequences,), -1, dtype=torch.int32, device=device)
        self.table_SP = torch.zeros(sequences, -(-longest // cache.page_size), dtype=torch.int32, device=device)
        self.temperatures_S = torch.zeros(sequences, dtype=torch.float32, device=device)
        self.seeds_S = torch.zeros(sequences, dtype=torch.int64, device=device)
        self.numbers_S = torch.arange(sequences, dtype=torch.int32, device=device)
        self.tiles_S2 = torch.stack([self.numbers_S, torch.ones_like(self.numbers_S)], 1).contiguous()
        self.sizes = sorted({size for size in SIZES if size < sequences} | {sequences})
        self.known_places = [-1] * sequences  # as the device has them
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.pool: Any = None

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, layout: Layout) -> Tensor:
        """The normalised hidden states of any layout over this cache: a prompt, or a part of one."""
        assert layout.cache is self.cache
        shape = self.model.config.attention
        assert isinstance(shape, GroupedQuery)
        group = shape.heads // shape.kv_heads
        rows = cuda.rows_of(layout, self.cache.page_size, group, self.model.dtype == torch.float32)
        return self.fused(tokens_T, layout.positions_T.to(torch.int32), rows)

    def begin(
        self,
        rows: Sequence[int],
        tokens: Sequence[int],
        places: Sequence[int],
        pages: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> None:
        """Put sequences in rows: their last token, not yet computed, its place (-1 empties the row), their pages."""
        at = self._device(rows, torch.int64)
        self.tokens_S.index_copy_(0, at, self._device(tokens, torch.int32))
        self.places_S.index_copy_(0, at, self._device(places, torch.int32))
        self.temperatures_S.index_copy_(0, at, self._device(temperatures, torch.float32))
        self.seeds_S.index_copy_(0, at, self._device(seeds, torch.int64))
        for row, place in zip(rows, places, strict=True):
            self.known_places[row] = place
        self.give_pages(rows, pages)

    def give_pages(self, rows: Sequence[int], pages: Sequence[Sequence[int]]) -> None:
        """All pages of some rows' sequences, after some were added."""
        width = self.table_SP.shape[1]
        table = [[*mine, *[0] * (width - len(mine))] for mine in pages]
        self.table_SP.index_copy_(0, self._device(rows, torch.int64), self._device(table, torch.int32))

    @torch.inference_mode()
    def run(self, sequences: int) -> Chosen:
        """One step of the first `sequences` rows. The pages they will write to must have been given."""
        size = next(size for size in self.sizes if size >= sequences)
        longest = max(self.known_places[:size]) + 1
        assert 0 < longest <= self.longest, "no sequence, or one that has outgrown this step"
        graph, chosen_S, logprobs_S = self.graph(size, longest)
        graph.replay()
        self.known_places[:size] = [place + 1 if place >= 0 else place for place in self.known_places[:size]]
        tokens_S = torch.empty(sequences, dtype=torch.int32, pin_memory=True)
        values_S = torch.empty(sequences, dtype=torch.float32, pin_memory=True)
        tokens_S.copy_(chosen_S[:sequences], non_blocking=True)
        values_S.copy_(logprobs_S[:sequences], non_blocking=True)
        there = torch.cuda.Event()
        there.record()
        return Chosen(tokens_S, values_S, there)

    def graph(self, size: int, longest: int) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        """The graph for so many rows and such lengths, captured when first wanted. How many pieces of the keys it has
        room for changes no bit of the result."""
        pieces = 1
        while pieces * SPLIT < longest:
            pieces *= 2
        key = (size, pieces)
        if key not in self.graphs:
            before = self.tokens_S.clone(), self.places_S.clone()
            self._step(size, pieces)  # compiles; what it writes to the cache the graph will write again
            self.tokens_S.copy_(before[0]), self.places_S.copy_(before[1])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool):
                chosen_S, logprobs_S = self._step(size, pieces)
            self.pool = self.pool or graph.pool()
            self.graphs[key] = (graph, chosen_S, logprobs_S)
        return self.graphs[key]

    def _step(self, size: int, pieces: int) -> tuple[Tensor, Tensor]:
        tokens_S, places_S = self.tokens_S[:size], self.places_S[:size]
        rows = Rows(
            places_T=places_S,
            sequences_T=self.numbers_S[:size],
            table_SP=self.table_SP[:size],
            longest=pieces * SPLIT,
            few_X2=self.tiles_S2[:size],
        )
        hidden_SD = self.fused(tokens_S, places_S, rows)
        logits_SV = linear(hidden_SD, self.model.output)
        return sample(logits_SV, self.temperatures_S[:size], self.seeds_S[:size], tokens_S, places_S)

    def _device(self, values: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).pin_memory().to(self.model.device, non_blocking=True)
