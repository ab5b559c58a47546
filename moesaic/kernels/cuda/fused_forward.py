"""A model's forward for graphed steps, from its weights alone: as few kernels as there can be.

The small operations are joined: each half of a layer leaves what is to be added to the stream, and the norm after it
adds it; queries and keys are normed, rotated and stored in the KV cache at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.cuda import fast
from moesaic.kernels.cuda.step_inputs import Tiling
from moesaic.kernels.interface import KVCache, QKNorm, RopeAngles
from moesaic.kernels.layer_weights import (
    DenseWeights,
    GroupedQueryWeights,
    LatentWeights,
    LayerWeights,
    LinearWeights,
    MixtureWeights,
    NormWeights,
)
from moesaic.kernels.triton import gated
from moesaic.kernels.triton.attention import expanded, latent
from moesaic.kernels.triton.attention.paged import attend, latent_tile
from moesaic.kernels.triton.attention.paged_rows import Rows, prefill_tile
from moesaic.kernels.triton.attention.prompt_rows import Prompts
from moesaic.kernels.triton.attention.qk_norm_rope_cache import qk_norm_rope_into_cache
from moesaic.kernels.triton.embedding import embed
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.router import TopK, route, supports_groups
from moesaic.kernels.triton.linear import linear
from moesaic.kernels.triton.norm import add_and_norm, rms_norm
from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight


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


def takes(weights: StepWeights) -> bool:
    """Whether a model is of the kind the fused forward is written for; others run operation by operation."""
    rules = [mixture.rules for mixture in weights.mixtures]
    return (
        _known(weights.embed, weights.output)
        and all(map(_takes_layer, weights.layers))
        and len({rule.per_token for rule in rules}) <= 1
        and all(supports_groups(rule.count, rule.groups) for rule in rules)
    )


def _takes_layer(layer: LayerWeights) -> bool:
    attention, ffn = layer.attention, layer.ffn
    if layer.attention_post_norm is not None or layer.ffn_post_norm is not None:
        return False
    if isinstance(attention, LatentWeights):  # all that was cached is attended to, by a plain projection
        projections = [attention.q_down, attention.q_up, attention.kv_down, attention.out]
        if attention.sparse or not isinstance(attention.kv_up.weight, Tensor):
            return False
    else:
        projections = [attention.qkv, attention.out]
    if not _known(*(linear.weight for linear in projections if linear is not None)):
        return False
    if isinstance(ffn, DenseWeights):
        return _takes_dense(ffn)
    return (
        ffn.residual is None
        and ffn.experts.activation == "silu"
        and _known(ffn.experts.gate_up_EGD, ffn.experts.down_EDF)
        and (ffn.shared is None or _takes_dense(ffn.shared))
    )


def _takes_dense(dense: DenseWeights) -> bool:
    return dense.activation == "silu" and _known(dense.gate_up.weight, dense.down.weight)


def _known(*weights: Any) -> bool:
    return all(isinstance(weight, Tensor | GpuQuantizedWeight) for weight in weights)


def _kind(part: Any) -> Any:
    """What decides which kernels a layer needs: all but its place and the numbers in its weights."""
    if isinstance(part, Tensor):
        return tuple(part.shape), str(part.dtype), part.data_ptr() % 16  # kernels differ by it
    if isinstance(part, GpuQuantizedWeight):
        return part.extra_repr(), *((name, _kind(buffer)) for name, buffer in part.named_buffers())
    if is_dataclass(part):
        names = [field.name for field in fields(part) if field.name not in ("number", "site")]
        return type(part).__name__, *(_kind(getattr(part, name)) for name in names)
    return part


class FusedForward:
    """`caches` are the layers' parts of the paged KV cache, `rope` the angles of every position there can be.

    The experts that mixture layers choose go to `routes_LTK`, layer by layer, and are counted in each layer's `counts`;
    rows that are no tokens choose none. With `expand_prompts`, latents are expanded for tokens of prompts.
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
            self.tiling = Tiling(latent_tile(attention.heads, wide)[1], own)
        self.per_token = weights.mixtures[0].rules.per_token if weights.mixtures else 0
        self.expand_prompts = expand_prompts

    def one_of_each(self) -> FusedForward:
        """With a layer of each kind only: it launches all kernels that the whole one does, and each once."""
        counts = iter(self.counts)
        own = [next(counts) if layer.is_mixture else None for layer in self.weights.layers]
        kinds: dict[Any, int] = {}
        for number, layer in enumerate(self.weights.layers):
            around = [*self.caches[number].values(), *([] if (counts_E := own[number]) is None else [counts_E])]
            kinds.setdefault((_kind(layer), *(part.data_ptr() % 16 for part in around)), number)
        kept = list(kinds.values())
        return FusedForward(
            replace(self.weights, layers=tuple(self.weights.layers[number] for number in kept)),
            [self.caches[number] for number in kept],
            self.rope,
            [found_E for number in kept if (found_E := own[number]) is not None],
            self.expand_prompts,
        )

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
        more_TD = also_TD = None
        mixtures = iter(zip(routes_LTK, self.counts, strict=True))
        for layer, cache in zip(self.weights.layers, self.caches):
            x_TD, h_TD = self.normed(x_TD, more_TD, also_TD, layer.attention_norm)
            if isinstance(layer.attention, LatentWeights):
                more_TD = self.latent(layer.attention, h_TD, rows, cache["latent"])
            else:
                more_TD = self.grouped_query(layer.attention, h_TD, rows, cache)
            x_TD, h_TD = self.normed(x_TD, more_TD, None, layer.ffn_norm)
            if isinstance(layer.ffn, MixtureWeights):
                more_TD, also_TD = self.mixture(layer.ffn, h_TD, rows, *next(mixtures))
            else:
                more_TD, also_TD = self.dense(layer.ffn, h_TD), None
        return self.normed(x_TD, more_TD, also_TD, self.weights.norm)[1]

    def normed(
        self, x_TD: Tensor, more_TD: Tensor | None, also_TD: Tensor | None, norm: NormWeights
    ) -> tuple[Tensor, Tensor]:
        if more_TD is None:
            return x_TD, rms_norm(x_TD, norm.weight, norm.eps)
        return add_and_norm(x_TD, more_TD, norm.weight, norm.eps, also_TD)

    def linear(self, x_TI: Tensor, part: LinearWeights) -> Tensor:
        return linear(x_TI, part.weight, part.bias)

    def grouped_query(self, part: GroupedQueryWeights, h_TD: Tensor, rows: Rows, cache: KVCache) -> Tensor:
        qkv_TX = self.linear(h_TD, part.qkv)
        norm = None
        if part.q_norm is not None and part.k_norm is not None:
            norm = QKNorm(part.q_norm.weight, part.k_norm.weight, part.q_norm.eps)
        q_THC = qk_norm_rope_into_cache(
            qkv_TX, norm, self.rope, rows.positions_T, rows, cache, part.heads, part.kv_heads
        )
        out_THC = attend(q_THC, cache["keys"], cache["values"], rows, part.scale, part.window)
        return self.linear(out_THC.flatten(1), part.out)

    def latent(self, part: LatentWeights, h_TD: Tensor, rows: Rows, latents: Tensor) -> Tensor:
        """In latent space for prefill too, unless latents are expanded for the whole of a prompt: a token's bits do not
        depend on how its prompt was chunked."""
        query_TQ = h_TD
        if part.q_down is not None and part.q_norm is not None:
            query_TQ = rms_norm(self.linear(h_TD, part.q_down), part.q_norm.weight, part.q_norm.eps)
        q_THC = self.linear(query_TQ, part.q_up).unflatten(1, (part.heads, part.plain_size + part.rope_size))
        kv_TX = self.linear(h_TD, part.kv_down)
        up_HXK = part.kv_up.weight.unflatten(0, (part.heads, -1))
        keys_HPK, values_HVK = up_HXK.split([part.plain_size, part.value_size], dim=1)
        q_THX = latent.queries_into_cache(
            q_THC, kv_TX, keys_HPK, part.kv_norm, self.rope, rows.positions_T, rows, latents
        )
        out_THV = h_TD.new_empty(len(h_TD), part.heads, part.value_size)
        if rows.in_latent_space:
            out_THK = attend(q_THX, latents, latents, rows, part.scale, rope_size=part.rope_size)
            latent.matmul_by_head(out_THK, values_HVK, out_THV, rows.absorbed_T)
        if rows.prompts is not None:
            self.expanded(part, q_THC, q_THX, rows, rows.prompts, latents, out_THV)
        return self.linear(out_THV.flatten(1), part.out)

    def expanded(
        self,
        part: LatentWeights,
        q_THC: Tensor,
        q_THX: Tensor,
        rows: Rows,
        prompts: Prompts,
        latents: Tensor,
        out_THV: Tensor,
    ) -> None:
        """The rows of prompts, with every head's own keys and values."""
        rank, rounds = len(part.kv_norm.weight), prompts.rounds
        chunks = zip(prompts.sequences_X.chunk(rounds), prompts.positions_X.chunk(rounds), strict=True)
        for number, (sequences_X, positions_X) in enumerate(chunks):
            latent_XK, key_XR = expanded.gather(
                latents, sequences_X, positions_X, rows.page_table_SP, rank, q_THC.dtype
            )
            kv_XE = self.linear(latent_XK, part.kv_up)
            expanded.attend_expanded(
                q_THC, q_THX, kv_XE, key_XR, rows.positions_T, prompts.tiles_N4, out_THV, part.scale, number
            )

    def mixture(
        self, part: MixtureWeights, h_TD: Tensor, rows: Rows, routes_TK: Tensor, counts_E: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """What routed experts add to the stream, and what a shared one does."""
        choice = TopK.by(part.rules, rows.positions_T, routes_TK, counts_E)
        _, weights_TK = route(h_TD, part.router, part.correction, choice)
        out_TD = experts(h_TD, routes_TK, weights_TK, part.experts.gate_up_EGD, part.experts.down_EDF)
        return out_TD, None if part.shared is None else self.dense(part.shared, h_TD)

    def dense(self, part: DenseWeights, h_TD: Tensor) -> Tensor:
        gate_up_TG = self.linear(h_TD, part.gate_up)
        both = gated.gated(gate_up_TG) if gated.takes(gate_up_TG) else fast.gated(gate_up_TG, "silu")
        return self.linear(both, part.down)
