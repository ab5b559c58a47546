"""A model's forward for graphed steps, from its weights alone: as few kernels as there can be.

The small operations are joined: each half of a layer leaves what is to be added to the stream, and the norm after it
adds it; queries and keys are normed, rotated and stored in the KV cache at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.kernels.cuda import fast
from moesaic.kernels.cuda.sparse_weight import SparseWeight
from moesaic.kernels.cuda.step_inputs import Tiling
from moesaic.kernels.interface import KVCache, QKNorm, RopeAngles
from moesaic.kernels.layer_weights import (
    DenseWeights,
    GroupedQueryWeights,
    IndexerWeights,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
    NormWeights,
)
from moesaic.kernels.triton import gated
from moesaic.kernels.triton.attention import expanded, latent
from moesaic.kernels.triton.attention.choose import Chosen, choose
from moesaic.kernels.triton.attention.chosen_prompts import attend_chosen
from moesaic.kernels.triton.attention.index_rows import index_rows
from moesaic.kernels.triton.attention.paged import attend, latent_tile
from moesaic.kernels.triton.attention.paged_rows import Rows, prefill_tile
from moesaic.kernels.triton.attention.prompt_rows import Prompts
from moesaic.kernels.triton.attention.qk_norm_rope_cache import qk_norm_rope_into_cache
from moesaic.kernels.triton.embedding import embed
from moesaic.kernels.triton.experts import gate
from moesaic.kernels.triton.experts.biases import weighed_biases
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.router import TopK, route, supports_groups
from moesaic.kernels.triton.float8.weight import Float8Weight
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.low_rank import LowRank, add_low_rank
from moesaic.kernels.triton.norm import add_and_norm, rms_norm
from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight

UNKNOWN = "weights that are neither plain nor quantized as kernels of serving take them"


@dataclass(frozen=True)
class StepWeights:
    """All weights of a forward, from tokens to logits: tensors, or quantized as the GPU's kernels take them."""

    embed: Any  # (V, D)
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    output: Any  # (V, D)

    @property
    def mixtures(self) -> list[MixtureWeights]:
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MixtureWeights)]


def outside(weights: StepWeights) -> str | None:
    """Why a model is not of the kind the fused forward is written for, and runs operation by operation; else None."""
    latents = [layer.attention for layer in weights.layers if isinstance(layer.attention, LatentWeights)]
    if len({latent.sparse for latent in latents}) > 1:
        return "sparse attention in some layers only"
    rules = [mixture.rules for mixture in weights.mixtures]
    if len({rule.per_token for rule in rules}) > 1:
        return "layers with different numbers of experts per token"
    if not all(supports_groups(rule.count, rule.groups) for rule in rules):
        return "groups of experts that the router's kernel does not take"
    if not _known(weights.embed, weights.output):
        return UNKNOWN
    return next((reason for layer in weights.layers if (reason := _layer_outside(layer)) is not None), None)


def _layer_outside(layer: LayerWeights) -> str | None:
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, LatentWeights):  # all that was cached is attended to, by a plain projection
        projections = [attention.q_down, attention.q_up, attention.kv_down, attention.out]
        if attention.sparse and attention.indexer is not None:
            index = attention.indexer
            projections += [index.queries, index.keys, index.head_weights]
        if not isinstance(attention.kv_up.weight, Tensor):
            return "a quantized kv_b_proj"
    else:
        projections = [attention.qkv, attention.out]
        if attention.beyond is not None:
            return attention.beyond
    dense = ffn.shared if isinstance(ffn, MixtureWeights) else ffn
    projections += [] if dense is None else [dense.gate_up, dense.down]
    projections += [ffn.shared_gate] if isinstance(ffn, MixtureWeights) else []
    matrices = [linear.weight for linear in projections if linear is not None]
    if isinstance(ffn, MixtureWeights):
        if ffn.beyond is not None:
            return ffn.beyond
        if ffn.experts.activation not in gate.KNOWN:
            return f"experts with the activation {ffn.experts.activation}"
        own = [ffn.experts.gate_up_EGD, ffn.experts.down_EDF]
        if not gate_of(ffn).is_plain and not all(isinstance(weight, Tensor) for weight in own):
            return "quantized experts with biases or a gate of their own"
        if ffn.down_bias_ED is not None and ffn.shared is not None:
            return "experts with biases beside a shared one"
        matrices += own
    return None if _known(*matrices) else UNKNOWN


def gate_of(part: MixtureWeights) -> gate.Gate:
    return gate.Gate.of(part.experts.activation, part.experts.bias_EG)


def _known(*weights: Any) -> bool:
    return all(isinstance(weight, Tensor | GpuQuantizedWeight | Float8Weight | SparseWeight) for weight in weights)


def _kind(part: Any) -> Any:
    """What decides which kernels a layer needs: all but its place and the numbers in its weights."""
    if isinstance(part, Tensor):
        return tuple(part.shape), str(part.dtype), part.data_ptr() % 16  # kernels differ by it
    if isinstance(part, GpuQuantizedWeight | Float8Weight | SparseWeight):
        return part.extra_repr(), *((name, _kind(buffer)) for name, buffer in part.named_buffers())
    if is_dataclass(part):
        names = [field.name for field in fields(part) if field.name not in ("number", "site")]
        return type(part).__name__, *(_kind(getattr(part, name)) for name in names)
    return part


def adaptable_sites(weights: StepWeights) -> set[str]:
    """Where the fused forward adds a LoRA adapter's correction: not to what expands latents, which are absorbed."""
    return {site for layer in weights.layers for site in _adaptable(layer)}


def _adaptable(layer: LayerWeights) -> list[str]:
    attention, ffn = layer.attention, layer.ffn
    if isinstance(attention, LatentWeights):
        linears = [attention.q_down, attention.q_up, attention.kv_down, attention.out]
    else:
        linears = [attention.qkv, attention.out]
    dense = ffn.shared if isinstance(ffn, MixtureWeights) else ffn
    linears += [] if dense is None else [dense.gate_up, dense.down]
    return [linear.site for linear in linears if linear is not None]


class FusedForward:
    """`caches` are the layers' parts of the paged KV cache, `rope` the angles of every position there can be.

    The experts that mixture layers choose go to `routes_LTK`, layer by layer, and are counted in each layer's `counts`;
    rows that are no tokens choose none. With `expand_prompts`, latents are expanded for tokens of prompts. `adapters`
    are the matrices of LoRA adapters by their sites, for rows that have one.
    """

    def __init__(
        self,
        weights: StepWeights,
        caches: Sequence[KVCache],
        rope: RopeAngles,
        counts: Sequence[Tensor],
        expand_prompts: bool = False,
    ) -> None:
        self.weights, self.caches, self.counts = weights, caches, counts
        self.rope = rope
        self.max_length = len(rope.cos_TR)
        attention, wide = weights.layers[0].attention, weights.embed.dtype == torch.float32
        if isinstance(attention, GroupedQueryWeights):
            self.tiling = Tiling(prefill_tile(attention.heads // attention.kv_heads, wide))
        else:
            own = expanded.tile_rows(wide) if expand_prompts else 0
            if attention.indexer is not None:  # every token has keys of its own
                self.tiling = Tiling(1, own, attention.indexer.topk)
            else:
                self.tiling = Tiling(latent_tile(attention.heads, wide)[1], own)
        self.per_token = weights.mixtures[0].rules.per_token if weights.mixtures else 0
        self.expand_prompts = expand_prompts
        self.adapters: Mapping[str, LowRank] = {}

    def one_of_each(self) -> FusedForward:
        """With a layer of each kind only: it launches all kernels that the whole one does, and each once."""
        counts = iter(self.counts)
        own = [next(counts) if layer.is_mixture else None for layer in self.weights.layers]
        kinds: dict[Any, int] = {}
        for number, layer in enumerate(self.weights.layers):
            around = [*self.caches[number].values(), *([] if (counts_E := own[number]) is None else [counts_E])]
            ranks = [self.adapters[site].rank if site in self.adapters else 0 for site in _adaptable(layer)]
            kinds.setdefault((_kind(layer), *ranks, *(part.data_ptr() % 16 for part in around)), number)
        kept = list(kinds.values())
        sample = FusedForward(
            replace(self.weights, layers=tuple(self.weights.layers[number] for number in kept)),
            [self.caches[number] for number in kept],
            self.rope,
            [found_E for number in kept if (found_E := own[number]) is not None],
            self.expand_prompts,
        )
        sample.adapters = self.adapters
        return sample

    def new_routes(self, tokens: int) -> Tensor:
        """A layer's begin at a multiple of 16 bytes, as the first's do: there are no other kernels for them."""
        numbers = tokens * self.per_token
        shape = (len(self.counts), -(-numbers // 4) * 4)
        routes_LX = torch.empty(shape, dtype=torch.int32, device=self.rope.cos_TR.device)
        return routes_LX[:, :numbers].unflatten(1, (tokens, self.per_token))

    def embed(self, tokens_T: Tensor, slots_T: Tensor, sampled_S: Tensor) -> Tensor:
        """Each token's row of the embedding; a token of -1 is the last one sampled for its slot."""
        return embed(tokens_T, slots_T, sampled_S, self.weights.embed)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return linear(hidden_RD, self.weights.output)

    def __call__(self, x_TD: Tensor, rows: Rows, routes_LTK: Tensor) -> Tensor:
        more_TD = also_TD = chosen = None
        mixtures = iter(zip(routes_LTK, self.counts, strict=True))
        for layer, cache in zip(self.weights.layers, self.caches):
            x_TD, h_TD = self.normed(x_TD, more_TD, also_TD, layer.attention_norm)
            if isinstance(layer.attention, LatentWeights):
                more_TD, chosen = self.latent(layer.attention, h_TD, rows, cache, chosen)
            else:
                more_TD = self.grouped_query(layer.attention, h_TD, rows, cache)
            more_TD = self.post_norm(more_TD, None, layer.attention_post_norm)
            x_TD, h_TD = self.normed(x_TD, more_TD, None, layer.ffn_norm)
            if isinstance(layer.ffn, MixtureWeights):
                more_TD, also_TD = self.mixture(layer.ffn, h_TD, rows, *next(mixtures))
            else:
                more_TD, also_TD = self.dense(layer.ffn, h_TD, rows), None
            if layer.ffn_post_norm is not None:
                more_TD, also_TD = self.post_norm(more_TD, also_TD, layer.ffn_post_norm), None
        return self.normed(x_TD, more_TD, also_TD, self.weights.norm)[1]

    def normed(
        self, x_TD: Tensor, more_TD: Tensor | None, also_TD: Tensor | None, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        if more_TD is None:
            return x_TD, rms_norm(x_TD, norm.weight, norm.eps)
        return add_and_norm(x_TD, more_TD, norm.weight, norm.eps, also_TD)

    def post_norm(self, more_TD: Tensor, also_TD: Tensor | None, norm: NormWeights | None) -> Tensor:
        """What half a layer made, normed before it is added (GLM-4)."""
        if norm is None:
            return more_TD
        return rms_norm(more_TD if also_TD is None else more_TD + also_TD, norm.weight, norm.eps)

    def linear(self, x_TI: Tensor, part: LinearWeights, rows: Rows) -> Tensor:
        out_TO = linear(x_TI, part.weight, part.bias)
        if rows.adapters_T is not None and part.site in self.adapters:
            add_low_rank(out_TO, x_TI, self.adapters[part.site], rows.adapters_T)
        return out_TO

    def grouped_query(self, part: GroupedQueryWeights, h_TD: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        qkv_TX, norm = self.projected(part, h_TD, rows)
        q_THC = qk_norm_rope_into_cache(
            qkv_TX, norm, self.rope, rows.positions_T, rows, cache, part.heads, part.kv_heads
        )
        keys, values = cache["keys"], cache["values"]
        out_THC = attend(q_THC, keys, values, rows, part.scale, part.window, sinks_H=part.sinks_H)
        return self.linear(out_THC.flatten(1), part.out, rows)

    def projected(self, part: GroupedQueryWeights, h_TD: Tensor, rows: Rows) -> tuple[Tensor, QKNorm | None]:
        """Queries, keys and values of every token, and the norms of heads that are still to come."""
        qkv_TX = self.linear(h_TD, part.qkv, rows)
        if part.q_norm is None or part.k_norm is None:
            return qkv_TX, None
        norm = QKNorm(part.q_norm.weight, part.k_norm.weight, part.q_norm.eps)
        if not part.norms_whole:
            return qkv_TX, norm
        q_TX, k_TX, v_TX = qkv_TX.split([len(norm.q_C), len(norm.k_C), len(norm.k_C)], dim=1)
        normed = rms_norm(q_TX, norm.q_C, norm.eps), rms_norm(k_TX, norm.k_C, norm.eps)
        return torch.cat([*normed, v_TX], 1), None

    def latent(
        self, part: LatentWeights, h_TD: Tensor, rows: Rows, cache: KVCache, chosen: Chosen | None
    ) -> tuple[Tensor, Chosen | None]:
        """In latent space for prefill too, unless latents are expanded for the whole of a prompt: a token's bits do not
        depend on how its prompt was chunked. With what an indexer chose, this layer's or the last one's that has one.
        """
        latents = cache["latent"]
        query_TQ = h_TD
        if part.q_down is not None and part.q_norm is not None:
            query_TQ = rms_norm(self.linear(h_TD, part.q_down, rows), part.q_norm.weight, part.q_norm.eps)
        q_THC = self.linear(query_TQ, part.q_up, rows).unflatten(1, (part.heads, part.plain_size + part.rope_size))
        if part.indexer is not None:
            chosen = self.choose(part.indexer, h_TD, query_TQ, rows, cache["index"])
        kv_TX = self.linear(h_TD, part.kv_down, rows)
        up_HXK = part.kv_up.weight.unflatten(0, (part.heads, -1))
        keys_HPK, values_HVK = up_HXK.split([part.plain_size, part.value_size], dim=1)
        q_THX = latent.queries_into_cache(
            q_THC, kv_TX, keys_HPK, part.kv_norm, self.rope, rows.positions_T, rows, latents
        )
        out_THV = h_TD.new_empty(len(h_TD), part.heads, part.value_size)
        if rows.in_latent_space:
            own_TK = chosen.slots_TK if chosen is not None else None
            out_THK = attend(q_THX, latents, latents, rows, part.scale, rope_size=part.rope_size, chosen_TK=own_TK)
            if rows.choosing and own_TK is not None:
                attend_chosen(q_THX, latents, own_TK, rows, part.scale, part.rope_size, out_THK)
            latent.matmul_by_head(out_THK, values_HVK, out_THV, rows.kinds_T)
        if rows.prompts is not None:
            self.expanded(part, q_THC, q_THX, rows, rows.prompts, latents, out_THV, chosen)
        return self.linear(out_THV.flatten(1), part.out, rows), chosen

    def choose(self, part: IndexerWeights, h_TD: Tensor, query_TQ: Tensor, rows: Rows, keys: Tensor) -> Chosen:
        """Where in the cache lies what each row attends to; the tokens' index keys are written there first."""
        rope = replace(self.rope, interleaved=part.interleaved)
        scored = rows.index_X2 is not None
        q_TX = self.linear(query_TQ, part.queries, rows) if scored else None
        weights_TH = self.linear(h_TD, part.head_weights, rows) if scored else None
        k_TC = self.linear(h_TD, part.keys, rows)
        q_THC = index_rows(q_TX, k_TC, part.key_norm, rope, rows.positions_T, rows, keys)
        return choose(q_THC, weights_TH, keys, rows, part.topk)

    def expanded(
        self,
        part: LatentWeights,
        q_THC: Tensor,
        q_THX: Tensor,
        rows: Rows,
        prompts: Prompts,
        latents: Tensor,
        out_THV: Tensor,
        chosen: Chosen | None,
    ) -> None:
        """The rows of prompts, with every head's own keys and values."""
        bits_TW, topk = (None, 0) if chosen is None else (chosen.bits_TW, chosen.slots_TK.shape[1])
        rank, rounds = len(part.kv_norm.weight), prompts.rounds
        chunks = zip(prompts.sequences_X.chunk(rounds), prompts.positions_X.chunk(rounds), strict=True)
        for number, (sequences_X, positions_X) in enumerate(chunks):
            latent_XK, key_XR = expanded.gather(
                latents, sequences_X, positions_X, rows.page_table_SP, rank, q_THC.dtype
            )
            kv_XE = linear(latent_XK, part.kv_up.weight, part.kv_up.bias)
            expanded.attend_expanded(
                q_THC,
                q_THX,
                kv_XE,
                key_XR,
                rows.positions_T,
                prompts.tiles_N4,
                out_THV,
                part.scale,
                number,
                bits_TW,
                topk,
            )

    def mixture(
        self, part: MixtureWeights, h_TD: Tensor, rows: Rows, routes_TK: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What routed experts add to the stream, and what a shared one does."""
        choice = TopK.by(part.rules, rows.positions_T, routes_TK, counts_E)
        _, weights_TK = route(h_TD, part.router, part.correction, choice, part.router_bias_E)
        matrices = part.experts.gate_up_EGD, part.experts.down_EDF
        out_TD = experts(h_TD, routes_TK, weights_TK, *matrices, gate=gate_of(part))
        if part.down_bias_ED is not None:
            return out_TD, weighed_biases(routes_TK, weights_TK, part.down_bias_ED)
        if part.shared is None:
            return out_TD, None
        shared_TD = self.dense(part.shared, h_TD, rows)
        if part.shared_gate is not None:  # a sigmoid, in the form that has the same bits in any batch
            gate_T1 = linear(h_TD, part.shared_gate.weight, part.shared_gate.bias)
            shared_TD = shared_TD * F.pad(gate_T1, (0, 1)).softmax(-1)[:, :1]
        if part.residual is None:
            return out_TD, shared_TD
        share_T2 = linear(h_TD, part.residual.weight, part.residual.bias).softmax(-1)
        return shared_TD * share_T2[:, :1] + out_TD * share_T2[:, 1:], None

    def dense(self, part: DenseWeights, h_TD: Tensor, rows: Rows) -> Tensor:
        gate_up_TG = self.linear(h_TD, part.gate_up, rows)
        silu = part.activation == "silu" and gated.takes(gate_up_TG)
        both = gated.gated(gate_up_TG) if silu else fast.gated(gate_up_TG, part.activation)
        return self.linear(both, part.down, rows)
