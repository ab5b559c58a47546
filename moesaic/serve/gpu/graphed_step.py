"""One step of generation as one CUDA graph: tokens in, a forward of few kernels, the next tokens out.

    steps = GraphedSteps(model, cache, sequences=512, counts=...)
    steps.give_pages({(slot, 3): page})
    flight = steps.run(inputs)              queued; nothing waits
    tokens, logprobs, drawn = flight.wait()

A step is any mixture of prompts and answers: rows of (token, slot of its sequence, place), of which some are to be
followed by a token. A row's token may be left open: it is then the one last chosen for its slot, on the device, so that
a step can be queued before the host knows what came out of the one before it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moesaic.kernels.cuda import fast
from moesaic.kernels.quantized import QuantizedMatrix
from moesaic.kernels.triton.attention import latent
from moesaic.kernels.triton.attention.paged import SPLIT, attend, latent_tile
from moesaic.kernels.triton.attention.paged_rows import Rows, tile_tokens
from moesaic.kernels.triton.embedding import embed
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.router import Choice, route, takes_groups
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.norm import add_and_norm, heads, rms_norm
from moesaic.kernels.triton.sample import sample
from moesaic.model.attention import GroupedQueryAttention, LatentAttention
from moesaic.model.block import Block
from moesaic.model.config import Experts, GroupedQuery
from moesaic.model.experts import DenseFeedForward, MixtureFeedForward
from moesaic.model.layout import PagedCache
from moesaic.model.linear import Linear, Norm
from moesaic.model.rope import frequencies
from moesaic.model.transformer import Model
from moesaic.serve.gpu.inputs import Inputs, Shape, sections

KINDS: dict[type, torch.dtype] = {np.int32: torch.int32, np.float32: torch.float32, np.float64: torch.float64}
TURNS = 4  # so many steps may be under way before their buffers are used again; the engine queues two


@contextmanager
def no_collection() -> Iterator[None]:
    """Graphs that nobody needs any more must not be collected while another is captured: that breaks the capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def takes(model: Model) -> bool:
    """Whether a model is of the kind the fused forward is written for; others run as plain blocks."""
    return model.device.type == "cuda" and model.mode != "reference" and has_known_parts(model)


def has_known_parts(model: Model) -> bool:
    def plain(block: nn.Module) -> bool:
        assert isinstance(block, Block)
        attention, ffn = block.attention, block.ffn
        linears = [part for part in block.modules() if isinstance(part, Linear)]
        if isinstance(attention, LatentAttention):  # all that was cached is looked at, by plain weights
            known = not attention.index_kind and isinstance(attention.kv_up.weight, Tensor)
        else:
            known = isinstance(attention, GroupedQueryAttention)
        return (
            known
            and block.attention_post_norm is None
            and all(type(part) is Linear for part in linears)
            and (isinstance(ffn, DenseFeedForward) or ffn.residual is None)
        )

    mixtures = _routers(model)
    return (
        not any(isinstance(module, QuantizedMatrix) for module in model.modules())
        and model.config.rope.kind != "dynamic"
        and model.config.activation == "silu"
        and all(map(plain, model.layers))
        and len({shape.per_token for shape in mixtures}) <= 1
        and all(takes_groups(shape.count, shape.groups) for shape in mixtures)
    )


def _routers(model: Model) -> list[Experts]:
    return [layer.ffn.router.shape for layer in model.layers if isinstance(layer.ffn, MixtureFeedForward)]


class FusedForward:
    """The forward of `Model`, with the small operations joined.

    The experts that mixture layers choose go to `routes_LTK`, layer by layer, and are counted in each layer's `counts`;
    rows that are no tokens choose none.
    """

    def __init__(self, model: Model, cache: PagedCache, longest: int, counts: list[Tensor]) -> None:
        self.model, self.cache, self.counts = model, cache, counts
        speed_R, factor = frequencies(model.config.rope, model.config.context, model.device)
        angle_PR = torch.arange(longest, device=model.device)[:, None].float() * speed_R
        self.cos_PR, self.sin_PR = angle_PR.cos() * factor, angle_PR.sin() * factor

    def __call__(self, x_TD: Tensor, rows: Rows, routes_LTK: Tensor) -> Tensor:
        """Each half of a block leaves what is to be added to the stream; the norm after it adds it."""
        more_TD = None
        mixtures = iter(zip(routes_LTK, self.counts, strict=True))
        for number, block in enumerate(self.model.layers):
            assert isinstance(block, Block)
            x_TD, h_TD = self.normed(x_TD, more_TD, block.attention_norm)
            more_TD = self.attention(block, h_TD, rows, self.cache.layers[number])
            x_TD, h_TD = self.normed(x_TD, more_TD, block.ffn_norm)
            if isinstance(block.ffn, MixtureFeedForward):
                more_TD = self.mixture(block.ffn, h_TD, rows, *next(mixtures))
            else:
                more_TD = self.dense(block.ffn, h_TD)
        return self.normed(x_TD, more_TD, self.model.norm)[1]

    def normed(self, x_TD: Tensor, more_TD: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        if more_TD is None:
            return x_TD, rms_norm(x_TD, norm.weight, norm.eps)
        return add_and_norm(x_TD, more_TD, norm.weight, norm.eps)

    def attention(self, block: Block, h_TD: Tensor, rows: Rows, slabs: dict[str, Tensor]) -> Tensor:
        part = block.attention
        if isinstance(part, LatentAttention):
            return self.latent(part, h_TD, rows, slabs["latent"])
        assert isinstance(part, GroupedQueryAttention)
        qkv_TX = linear(h_TD, part.qkv.weight, part.qkv.bias)
        norms = None
        if part.q_norm is not None and part.k_norm is not None:
            norms = (part.q_norm.weight, part.k_norm.weight, part.q_norm.eps)
        angles = (self.cos_PR, self.sin_PR, rows.places_T)
        q_THC = heads(qkv_TX, norms, angles, part.interleaved, rows, slabs, part.heads, part.kv_heads)
        out_THC = attend(q_THC, slabs["keys"], slabs["values"], rows, part.scale, part.window)
        return linear(out_THC.flatten(1), part.out.weight, part.out.bias)

    def latent(self, part: LatentAttention, h_TD: Tensor, rows: Rows, latents: Tensor) -> Tensor:
        """In latent space for prompts too, so that a token's bits do not depend on how its prompt was cut."""
        shape = part.shape
        query_TQ = h_TD
        if part.q_down is not None and part.q_norm is not None:
            query_TQ = rms_norm(linear(h_TD, part.q_down.weight, part.q_down.bias), part.q_norm.weight, part.q_norm.eps)
        q_THC = linear(query_TQ, part.q_up.weight, part.q_up.bias).unflatten(1, (shape.heads, shape.key_size))
        kv_TX = linear(h_TD, part.kv_down.weight, part.kv_down.bias)
        up_HXK = part.kv_up.weight.unflatten(0, (shape.heads, -1))
        keys_HPK, values_HVK = up_HXK.split([shape.plain_size, shape.value_size], dim=1)
        norm, angles = (part.kv_norm.weight, part.kv_norm.eps), (self.cos_PR, self.sin_PR, rows.places_T)
        q_THX = latent.queries(q_THC, kv_TX, keys_HPK, norm, angles, part.interleaved, rows, latents)
        out_THK = attend(q_THX, latents, latents, rows, part.scale, turning=shape.rope_size)
        out_THV = latent.by_head(out_THK, values_HVK, h_TD.new_empty(len(h_TD), shape.heads, shape.value_size))
        return linear(out_THV.flatten(1), part.out.weight, part.out.bias)

    def mixture(
        self, part: MixtureFeedForward, h_TD: Tensor, rows: Rows, routes_TK: Tensor, counts_E: Tensor
    ) -> Tensor:
        router, shape = part.router, part.router.shape
        choice = Choice(
            shape.per_token, shape.score == "sigmoid", shape.normalize, shape.scale, shape.groups, shape.top_groups,
            rows.places_T, routes_TK, counts_E,
        )  # fmt: skip
        _, weights_TK = route(h_TD, router.weight, router.correction, choice)
        out_TD = experts(h_TD, routes_TK, weights_TK, part.gate_up_EGD, part.down_EDF)
        return out_TD if part.shared is None else out_TD + self.dense(part.shared, h_TD)

    def dense(self, part: DenseFeedForward, h_TD: Tensor) -> Tensor:
        hidden_TF = fast.gated(linear(h_TD, part.gate_up.weight, part.gate_up.bias), "silu")
        return linear(hidden_TF, part.down.weight, part.down.bias)


@dataclass(frozen=True)
class Flight:
    """A step that was queued. What it chose is on its way to the host, and there after `wait`; hidden states, logits
    and routes are the step's own, and hold until it is queued again."""

    hidden_TD: Tensor
    logits_RV: Tensor
    routes_LTK: Tensor
    results_3R: np.ndarray
    there: torch.cuda.Event | None

    def wait(self) -> tuple[list[int], list[float], list[float]]:
        """Tokens, and their log-probabilities under the model and as they were drawn."""
        if self.there is not None:
            self.there.synchronize()
        tokens_R, plain_R, drawn_R = self.results_3R
        return tokens_R.tolist(), plain_R.view(np.float32).tolist(), drawn_R.view(np.float32).tolist()


@dataclass
class Recorded:
    """One shape of step: its graph, and the buffers it reads and writes."""

    inputs: Tensor
    outputs: tuple[Tensor, Tensor, Tensor, Tensor]  # hidden states, logits, routes, results
    graph: torch.cuda.CUDAGraph | None
    to_device: list[Tensor]
    to_host: list[Tensor]
    turn: int = 0


class GraphedSteps:
    """Steps over one cache, for up to `sequences` slots; a graph is captured when a shape is first wanted.

    `counts` is told how often each expert was chosen, `starts` where each mixture layer's experts begin in it.
    """

    def __init__(self, model: Model, cache: PagedCache, sequences: int, counts: Tensor, starts: list[int]) -> None:
        self.model, self.cache, self.counts = model, cache, counts
        device = model.device
        longest = min(model.config.context, cache.pages * cache.page_size)
        self.fused = FusedForward(model, cache, longest, [counts[start:] for start in starts])
        self.chosen_S = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.table_SP = torch.zeros(sequences, -(-longest // cache.page_size), dtype=torch.int32, device=device)
        self.graphs: dict[Shape, Recorded] = {}
        self.pool: Any = None
        self.real = device.type == "cuda"  # elsewhere, in tests, steps run as they come
        shape, wide = model.config.attention, model.dtype == torch.float32
        if isinstance(shape, GroupedQuery):
            self.tile = tile_tokens(shape.heads // shape.kv_heads, wide)
        else:
            self.tile = latent_tile(shape.heads, wide)[1]
        mixtures = _routers(model)
        self.per_token = mixtures[0].per_token if mixtures else 0

    def give_pages(self, pages: dict[tuple[int, int], int]) -> None:
        """Entries (slot, number of the page in its sequence) of the table that are new or changed."""
        width = self.table_SP.shape[1]
        both = torch.tensor([[slot * width + number for slot, number in pages], list(pages.values())])
        at, page = (both.pin_memory() if self.real else both).to(self.table_SP.device, non_blocking=True)
        self.table_SP.view(-1).index_copy_(0, at, page.to(torch.int32))

    def forget(self) -> None:
        """Graphs hold the places of weights in memory; after those have changed, none is right."""
        self.graphs.clear()
        self.pool = None  # it went with them

    def run(self, inputs: Inputs) -> Flight:
        """Queue a step. The pages it writes to must have been given."""
        recorded = self.graphs.get(inputs.shape)
        if recorded is None:
            recorded = self.graphs[inputs.shape] = self.record(inputs.shape)
        turn = recorded.turn = (recorded.turn + 1) % TURNS
        recorded.to_device[turn].numpy()[:] = inputs.words
        recorded.inputs.copy_(recorded.to_device[turn], non_blocking=True)
        if recorded.graph is not None:
            recorded.graph.replay()
            hidden_TD, logits_RV, routes_LTK, results_3R = recorded.outputs
        else:
            hidden_TD, logits_RV, routes_LTK, results_3R = self.step(inputs.shape, recorded.inputs)
        recorded.to_host[turn].copy_(results_3R, non_blocking=True)
        there = None
        if self.real:
            there = torch.cuda.Event()
            there.record()
        return Flight(hidden_TD, logits_RV, routes_LTK, recorded.to_host[turn].numpy(), there)

    def record(self, shape: Shape) -> Recorded:
        words = Inputs.empty(shape)  # rows that are no tokens: a step of them compiles everything and changes nothing
        inputs = torch.from_numpy(words).to(self.model.device)
        plural = self.counts.clone()
        outputs = self.step(shape, inputs)
        self.counts.copy_(plural)
        graph = None
        if self.real:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_collection(), torch.cuda.graph(graph, pool=self.pool):
                outputs = self.step(shape, inputs)
            self.pool = self.pool or graph.pool()
        host = partial(torch.empty, dtype=torch.int32, pin_memory=self.real)
        to_device = [host(len(words)) for _ in range(TURNS)]
        return Recorded(inputs, outputs, graph, to_device, [host(3, shape.chosen) for _ in range(TURNS)])

    def step(self, shape: Shape, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given = dict(self.views(shape, words))
        places_T, slots_T = given["places"], given["slots"]
        rows = Rows(
            places_T=places_T,
            sequences_T=slots_T,
            table_SP=self.table_SP,
            longest=shape.pieces * SPLIT,
            few_X2=given["tiles"].view(-1, 2) if shape.answers else None,
            many_X2=None if shape.answers else given["tiles"].view(-1, 2),
            many_tokens=self.tile,
        )
        routes_LTK = torch.empty(
            len(self.fused.counts), shape.tokens, self.per_token, dtype=torch.int32, device=words.device
        )
        x_TD = embed(given["tokens"], slots_T, self.chosen_S, self.model.embed)
        hidden_TD = self.fused(x_TD, rows, routes_LTK)
        last_RD = hidden_TD if shape.answers else hidden_TD.index_select(0, given["rows"])
        logits_RV = linear(last_RD, self.model.output)
        results_3R = sample(logits_RV, given["temperatures"], given["draws"], given["followed"], self.chosen_S)
        return hidden_TD, logits_RV, routes_LTK, results_3R

    def views(self, shape: Shape, words: Tensor) -> Iterator[tuple[str, Tensor]]:
        at = 0
        for name, (length, kind) in sections(shape).items():
            part = words[at : at + length]
            yield name, part.view(KINDS[kind])
            at += length
