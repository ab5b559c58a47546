"""The weights of a layer as plain data, for kernels that run more than one operation at a time and know no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class RouteRules(Protocol):
    """How a router's scores become a choice; `moesaic.model.config.Experts` is one."""

    @property
    def count(self) -> int: ...

    @property
    def per_token(self) -> int: ...

    @property
    def score(self) -> str: ...

    @property
    def normalize(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def groups(self) -> int: ...

    @property
    def top_groups(self) -> int: ...


@dataclass(frozen=True)
class LinearWeights:
    weight: Any  # (O, I), a tensor or a quantized weight
    bias: Tensor | None = None
    site: str = ""


@dataclass(frozen=True)
class NormWeights:
    weight: Tensor
    eps: float
    bias: Tensor | None = None  # of LayerNorms


@dataclass(frozen=True)
class GroupedQueryWeights:
    qkv: LinearWeights
    out: LinearWeights
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    heads: int
    kv_heads: int
    head_size: int
    window: int | None
    interleaved: bool
    scale: float
    norms_whole: bool = False  # of all heads' numbers together, and not of each head's
    sinks_H: Tensor | None = None
    beyond: str | None = None  # in words, what kernels of several operations do not know of it


@dataclass(frozen=True)
class IndexerWeights:
    """DSA's light heads, which choose the `topk` tokens that are attended to."""

    queries: LinearWeights
    keys: LinearWeights
    key_norm: NormWeights
    head_weights: LinearWeights
    topk: int
    interleaved: bool


@dataclass(frozen=True)
class LatentWeights:
    q_down: LinearWeights | None
    q_norm: NormWeights | None
    q_up: LinearWeights
    kv_down: LinearWeights
    kv_norm: NormWeights
    kv_up: LinearWeights
    out: LinearWeights
    heads: int
    plain_size: int  # dimensions of a head's query and key that are not rotated
    rope_size: int
    value_size: int
    interleaved: bool
    scale: float
    sparse: bool  # whether an indexer chooses what is attended to
    indexer: IndexerWeights | None = None  # its own; else a sparse layer attends to what the last one chose


@dataclass(frozen=True)
class DenseWeights:
    gate_up: LinearWeights
    down: LinearWeights
    activation: str


@dataclass(frozen=True)
class ExpertWeights:
    """All experts of a layer: (E, 2F, D) and (E, D, F), or a quantized matrix for each expert. Only the bias before the
    activation is here: what `down` adds is a sum that routes alone decide."""

    gate_up_EGD: Any
    down_EDF: Any
    activation: str
    site: str = ""
    bias_EG: Tensor | None = None


@dataclass(frozen=True)
class MixtureWeights:
    router: Tensor
    correction: Tensor | None
    rules: RouteRules
    experts: ExpertWeights
    shared: DenseWeights | None
    residual: LinearWeights | None
    shared_gate: LinearWeights | None = None
    router_bias_E: Tensor | None = None
    down_bias_ED: Tensor | None = None
    beyond: str | None = None


@dataclass(frozen=True)
class LayerWeights:
    number: int
    attention_norm: NormWeights
    attention: GroupedQueryWeights | LatentWeights
    attention_post_norm: NormWeights | None
    ffn_norm: NormWeights
    ffn: DenseWeights | MixtureWeights
    ffn_post_norm: NormWeights | None

    @property
    def is_mixture(self) -> bool:
        return isinstance(self.ffn, MixtureWeights)


@dataclass(frozen=True)
class EncoderLayerWeights:
    """`norm_after`: each half is added to the stream and then normed. Where the feed-forward has no gate, `gate_up` is
    its first matrix."""

    attention_norm: NormWeights | None
    attention: GroupedQueryWeights
    ffn_norm: NormWeights
    ffn: DenseWeights
    gated: bool
    norm_after: bool
