"""What an implementation of the model's operations offers, and the small forms in which a call is made.

A call names its site: the weight's path in the model (`layers.3.attention.qkv`). So an adapter, a quantized matrix, a
shard of it or a recorder can stand at one place without the model knowing. Forms that are made inside a layer are named
tuples, which a compiler of layers takes apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from moesaic.kernels.layer_weights import EncoderLayerWeights, ExpertWeights, LayerWeights, NormWeights, RouteRules

Mode = Literal["fast", "reference", "invariant"]
# One layer's: keys and values, or latents, each (pages, page size, ...); or what it keeps of sequences (places, ...).
KVCache = dict[str, Tensor]


class Batch(Protocol):
    """What attention needs to know of a flat batch; `moesaic.model.layout.Layout` is one."""

    @property
    def tokens(self) -> int: ...

    @property
    def spans(self) -> list[Any]: ...

    @property
    def spans_S4(self) -> Tensor: ...

    @property
    def pages_SP(self) -> Tensor | None: ...

    @property
    def states_S(self) -> Tensor: ...

    @property
    def has_trees(self) -> bool: ...

    def write(self, cache: Tensor, new_T: Tensor) -> None: ...

    def read(self, cache: Tensor, span: Any) -> Tensor: ...

    def mask(self, span: Any, window: int | None, chunked: bool = False) -> tuple[Tensor | None, int | None]: ...

    def per_sequence(self, *rows_T: Tensor) -> Iterator[tuple[Any, ...]]: ...


@dataclass(frozen=True)
class RopeAngles:
    """The rotary angles of every token, float32. Pairs of dimensions are halves of a head, or neighbours if
    interleaved."""

    cos_TR: Tensor
    sin_TR: Tensor
    interleaved: bool = False

    def at(self, rows_T: Tensor) -> RopeAngles:
        """Of some of the tokens."""
        return RopeAngles(self.cos_TR[rows_T], self.sin_TR[rows_T], self.interleaved)


class QKNorm(NamedTuple):
    """RMS norms of every head's query and key."""

    q_C: Tensor
    k_C: Tensor
    eps: float


class Mask(NamedTuple):
    """How one sequence attends: scores times `scale`, at most `window` back, and only to tokens that `keep` selects.
    Where it is not causal it looks as far ahead as it looks back; chunked, back to a multiple of the window. Places
    that `chosen_TK` has, in order and -1 behind the last, select where they are few. A head's sink is one more score in
    its softmax, of no token: what it weighs is lost."""

    scale: float
    window: int | None = None
    keep_TM: Tensor | None = None
    causal: bool = True
    chosen_TK: Tensor | None = None
    sinks_H: Tensor | None = None
    chunked: bool = False

    def spread(self, total: int) -> Mask:
        """With a mask in place of places, for kernels that take none."""
        if self.chosen_TK is None:
            return self
        return self._replace(keep_TM=mask_of(self.chosen_TK, total), chosen_TK=None)


def mask_of(chosen_TK: Tensor, total: int) -> Tensor:
    """Which of a sequence's tokens are among the places given for each query (T, total)."""
    mask_TM = torch.zeros(len(chosen_TK), total + 1, dtype=torch.bool, device=chosen_TK.device)
    return mask_TM.scatter_(1, chosen_TK.long().remainder(total + 1), True)[:, :total]


class PairBias(Protocol):
    """What is added to the score of every query and key, made in blocks (`kernels/biased_attention.py`)."""

    @property
    def causal(self) -> bool: ...

    @property
    def size(self) -> int:
        """Rows and keys of a block, at most."""
        ...

    @property
    def inputs(self) -> Sequence[Tensor]:
        """Tensors that autograd gives a gradient."""
        ...

    def block(self, sequence: int, rows: slice, keys: slice) -> Tensor:
        """Of some of a sequence's tokens: (heads or 1, rows, keys)."""
        ...

    def add_gradient(
        self, grads: list[Tensor | None], sequence: int, rows: slice, keys: slice, d_block_HRM: Tensor
    ) -> None:
        """Add up what a block's gradient is for the inputs; None stands for zeros."""
        ...


class AttentionCall(NamedTuple):
    """Over what a layer attends: its part of the KV cache, or without one the batch alone; at most `window` back, and
    as far ahead where it is not causal (an encoder, which has no cache). With a `bias`, whether later tokens are hidden
    is said there."""

    layout: Batch
    cache: KVCache | None
    scale: float
    window: int | None = None
    layer: int = 0
    bias: PairBias | None = None
    causal: bool = True
    sinks_H: Tensor | None = None  # a score of no token for every head, beside those of its tokens
    chunked: bool = False  # back to a multiple of the window, and not by it


class LatentCall(NamedTuple):
    """Latent attention (MLA) as projected, nothing normed or rotated yet: queries (T, H, C), and for every token its
    latent with the one key that is rotated (T, X). `up` makes keys and values of a latent; `expand` applies it the way
    its call site does. `selected` are the places (T, topk) a sparse indexer chose, for each sequence."""

    q_THC: Tensor
    kv_TX: Tensor
    norm_K: Tensor
    eps: float
    up: Any  # (H * (plain + value size), K), a tensor or a quantized weight
    expand: Callable[[Tensor], Tensor]
    plain_size: int  # dimensions of a head's query and key that are not rotated
    rope: RopeAngles
    attention: AttentionCall
    absorb: bool = True  # whether the shorter of two ways may be taken, whose results differ in the last bits
    selected: list[Tensor | None] | None = None


class DeltaCall(NamedTuple):
    """A gated delta rule as projected (`kernels/delta_rule.py`): of every token what becomes the queries and keys of
    key heads and the values of heads (T, X) once a causal convolution with these taps and a SiLU have mixed it with the
    tokens before; how strongly it writes, before a sigmoid; and how much of the state it lets fade, before
    exp(-exp(log rate) * softplus(decay + shift)). `states` are what the layer keeps of sequences, by their places;
    without them all begin here, and nothing is kept."""

    qkv_TX: Tensor
    strength_TH: Tensor
    decay_TH: Tensor
    taps_XW: Tensor
    log_rate_H: Tensor
    shift_H: Tensor
    key_heads: int
    key_size: int
    value_size: int
    layout: Batch
    states: KVCache | None = None


class Routes(NamedTuple):
    """The experts each token goes to (T, K), and the weight of each."""

    experts_TK: Tensor
    weights_TK: Tensor


class Dispatched(NamedTuple):
    """Assignments A, each a token and one of its experts, sorted by expert. Combining adds rows back to `token_A`."""

    x_AD: Tensor
    weights_A1: Tensor
    counts_E: Tensor
    token_A: Tensor
    tokens: int


@dataclass
class LayerStack:
    """Layers that kernels may run in one call; `prepared` is theirs, for what they make of the weights."""

    layers: tuple[LayerWeights, ...]
    prepared: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mixtures = [(at, layer.number) for at, layer in enumerate(self.layers) if layer.is_mixture]


@dataclass
class EncoderStack:
    """The same for the layers of an encoder."""

    layers: tuple[EncoderLayerWeights, ...]
    prepared: dict[str, Any] = field(default_factory=dict)


class Kernels(Protocol):
    """Shapes are in the legend of `moesaic.model`. A weight may be quantized where the kernels take it."""

    def embed(self, tokens_T: Tensor, table_VD: Tensor, site: str = "") -> Tensor: ...

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, site: str = "") -> Tensor: ...

    def linear_cross_entropy(
        self, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale_T: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The output matrix and the loss in one, so that never all logits exist: the scaled sum of -log p(target), and
        each token's own. Options: `cap` of the logits, `site`."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def layer_norm(
        self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, plus_TD: Tensor | None = None
    ) -> Tensor:
        """Of encoders; of a sum, where there is something to add."""

    def activate(self, x_TF: Tensor, activation: str) -> Tensor:
        """Of feed-forward layers without a gate. What was given may be written over."""

    def rotate(self, x_THC: Tensor, rope: RopeAngles) -> Tensor:
        """RoPE on the first 2R dimensions of every head; halves out however pairs came in, which leaves every
        query-key product as it was."""

    def qk_norm_rope(
        self, qkv_TXC: Tensor, kv_heads: int, norm: QKNorm | None, rope: RopeAngles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every token out of one projection: split, normed, queries and keys rotated."""

    def attention(self, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor, mask: Mask) -> Tensor:
        """One sequence: its last T tokens attend to its M tokens, in order."""

    def attend(self, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor, call: AttentionCall) -> Tensor:
        """A whole flat batch: new keys and values go to the cache where there is one, then every token attends to its
        own sequence so far."""

    def attend_latent(self, call: LatentCall) -> Tensor:
        """The same for latent attention, which caches one latent per token: (T, H, value size)."""

    def delta_rule(self, call: DeltaCall) -> Tensor:
        """In place of attention: what each head reads from its state (T, H, value size), in float32 until then."""

    def index_rows(
        self, q_THC: Tensor | None, k_TC: Tensor, norm: NormWeights, rope: RopeAngles
    ) -> tuple[Tensor | None, Tensor]:
        """Of DSA's indexer: queries rotated, where there are some, and keys normed and rotated."""

    def select_tokens(
        self, q_THC: Tensor, k_TC: Tensor, weights_TH: Tensor, layout: Batch, cache: KVCache | None, topk: int
    ) -> list[Tensor | None]:
        """For latent attention that looks at `topk` earlier tokens only: for each sequence their places (new, topk), in
        order and -1 behind the last; None where all fit. Keys are in the cache already where there is one."""

    def gated(self, gate_up_TG: Tensor, activation: str) -> Tensor:
        """activation(first half) * second half; `clamped_swiglu` is a gate of its own (`reference.clamped_swiglu`), and
        heads are gated by a `sigmoid`."""

    def router_logits(self, x_TD: Tensor, weight_ED: Tensor, site: str = "") -> Tensor:
        """How well each expert suits each token, in float32 whatever the model's dtype."""

    def route(
        self, logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
    ) -> Routes:
        """The experts each token goes to, or those already chosen, and the weight of each."""

    def dispatch(self, x_TD: Tensor, routes: Routes, experts: int) -> Dispatched:
        """Every token's row to each of its experts, sorted by expert."""

    def compute_experts(self, sent: Dispatched, weights: ExpertWeights) -> Tensor:
        """Each row through its expert, times the routing weight."""

    def combine(self, y_AD: Tensor, sent: Dispatched) -> Tensor:
        """Each token's sum of its rows."""

    def experts(self, x_TD: Tensor, routes: Routes, weights: ExpertWeights) -> Tensor:
        """Dispatch, compute and combine. On one device all three may be one kernel."""

    def run_layers(
        self, stack: LayerStack, x_TD: Tensor, rope: RopeAngles, layout: Batch, caches: Sequence[KVCache]
    ) -> tuple[Tensor, list[Tensor]] | None:
        """All layers of a stack in one call, to the same bits, and the experts each chose (T, K); None where they must
        go operation by operation."""

    def run_encoder(
        self, stack: EncoderStack, x_TD: Tensor, layout: Batch, ropes: Sequence[RopeAngles | None]
    ) -> Tensor | None:
        """All layers of an encoder in one call, each with its rotary angles if it has any; None where they must go
        operation by operation."""
