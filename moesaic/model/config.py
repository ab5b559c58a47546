"""What a model is, as frozen data: every family is one `ModelConfig`, every layer one `Layer`.

Whatever differs from layer to layer (dense first layers, DeepSpeed-MoE's pyramid, sliding windows, shared indexers) is
a field of that layer, so no code asks "which family is this?" or "is this an early layer?".
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.errors import UserError

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3"]
# "clamped_swiglu" is a gate of its own (gpt-oss), the others are silu, gelu and relu of the gate times up.
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]


@dataclass(frozen=True)
class Rope:
    """Rotary positions: which part of a head turns, how fast, and how the context was stretched."""

    size: int  # how many of a head's dimensions turn
    theta: float = 10_000.0
    kind: RopeKind = "default"
    interleaved: bool = False  # pairs are neighbours (x0, x1) instead of halves (x0, x_{R/2})
    factor: float = 1.0
    original_context: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class GroupedQuery:
    """Attention in which `heads` query heads share `kv_heads` key/value heads."""

    heads: int
    kv_heads: int
    head_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    # What is normed: each head; all heads of a token as one vector (OLMoE); each head, but after it was rotated
    # (Hunyuan); each head on layers with positions, without weights (Llama 4).
    norm: Literal["heads", "whole", "rotated", "unit"] = "heads"
    sinks: bool = False  # every head has a learned logit in its softmax that stands for no token (gpt-oss)
    gated: bool = False  # what heads give is multiplied by a sigmoid that the token projects, too (Qwen3-Next)


@dataclass(frozen=True)
class Indexer:
    """DSA's lightning indexer: a light scorer that picks the `topk` tokens a query may attend to."""

    heads: int
    head_size: int
    topk: int
    interleaved: bool = True  # RoPE rotates neighbouring dimensions; DeepSeek-V3.2 rotates halves here alone


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: keys and values are kept as one latent vector per token and a shared rotary key."""

    heads: int
    kv_rank: int
    plain_size: int  # query/key dimensions that carry no position
    rope_size: int
    value_size: int
    q_rank: int | None = None
    bias: bool = False
    indexer: Indexer | None = None

    @property
    def key_size(self) -> int:
        return self.plain_size + self.rope_size


@dataclass(frozen=True)
class DeltaRule:
    """In place of attention: heads that write what they see into a state of `key_size` by `value_size`, and read it
    (gated delta rule; Qwen3-Next). Several heads share the query and key of one key head; queries, keys and values go
    through a causal convolution over the last `width` tokens first."""

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    width: int = 4


@dataclass(frozen=True)
class Dense:
    hidden: int
    bias: bool = False
    gated: bool = True


@dataclass(frozen=True)
class Experts:
    """A mixture layer. `correction` is the aux-loss-free balance bias; `residual` weighs the shared expert against the
    routed ones by a learned coefficient (DeepSpeed-MoE's residual expert)."""

    count: int
    per_token: int
    hidden: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    shared_hidden: int = 0
    residual: bool = False
    bias: bool = False  # of the router and of the experts' matrices
    shared_gate: bool = False  # a token's share of the shared expert is learned, too (Qwen2-MoE)
    scales_input: bool = False  # the weight is that of an expert's input, not of what it gives (Llama 4)


@dataclass(frozen=True)
class Temperature:
    """Queries of later tokens are longer (Llama 4): times 1 + `scale` * log(1 + how many times `floor` tokens there are
    up to theirs)."""

    floor: int
    scale: float


@dataclass(frozen=True)
class Reading:
    """In place of a feed-forward network: cross-attention to the model's knowledge base, with queries and keys of
    `hidden` dimensions."""

    hidden: int


@dataclass(frozen=True)
class Knowledge:
    """A base of facts that all reading layers share; of a fact's text, so many tokens are read."""

    words: int


@dataclass(frozen=True)
class Layer:
    ffn: Dense | Experts | Reading
    window: int | None = None
    chunked: bool = False  # the window is no distance: tokens see those before them in the same run of so many
    positions: bool = True  # whether queries and keys are rotated
    temperature: Temperature | None = None
    index: Literal["full", "shared"] | None = None  # DSA: own top-k selection, or that of the last full layer
    rope: Rope | None = None  # where it is another than the model's (ModernBERT's layers with a window)
    delta: DeltaRule | None = None  # in place of attention; then nothing above but the feed-forward network holds


@dataclass(frozen=True)
class Classifier:
    """What an encoder makes of a text as a whole: one hidden state, through a dense layer, to so many labels. BERT has
    the dense layer (its pooler) without labels, too."""

    labels: int
    activation: Literal["tanh", "gelu", "gelu_tanh", "silu", "relu"] = "tanh"
    pooling: Literal["cls", "mean"] = "cls"
    bias: bool = True  # of the dense layer
    norm: bool = False  # after the activation
    score: Literal["sigmoid", "identity"] = "sigmoid"  # of a single label, as sentence-transformers reports it


@dataclass(frozen=True)
class Encoder:
    """What a model has that reads a text as a whole and writes none: attention looks both ways, norms are LayerNorms,
    and there is no output matrix."""

    norm_after: bool = False  # each half of a layer is added and then normed (BERT); else before, as everywhere
    norm_bias: bool = True
    positions: int = 0  # learned ones; 0: rotary
    first_position: int = 0  # the row of a sequence's first token
    token_types: int = 0
    classifier: Classifier | None = None


@dataclass(frozen=True)
class Infilling:
    """A model that fills blanks (GLM). Up to the first `start` token, which begins what is written into a blank, a
    sequence sees all of itself; `masks` are the blanks, the last of them for the rest of a text."""

    start: int
    masks: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab: int
    hidden: int
    attention: GroupedQuery | Latent
    rope: Rope
    layers: tuple[Layer, ...]
    mtp: tuple[Layer, ...] = ()
    context: int = 2048
    norm_eps: float = 1e-6
    post_norms: bool = False  # a second norm after attention and after the feed-forward (GLM-4)
    norm_offset: bool = False  # norms multiply by one more than their weights (Qwen3-Next)
    activation: Activation = "silu"
    tied: bool = False
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    init_std: float = 0.02
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    encoder: Encoder | None = None
    knowledge: Knowledge | None = None
    infilling: Infilling | None = None
    # Where the norm stands: before each half of a layer, or after what it adds to the stream (as in the first
    # Transformers); deep: after a stream that counts more the deeper the model (DeepNorm).
    norm: Literal["pre", "post", "deep"] = "pre"

    def __post_init__(self) -> None:
        check(self)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, Experts) for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether some layer keeps a state of every sequence, in place of something for each of its tokens."""
        return any(layer.delta is not None for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def check(config: ModelConfig) -> None:
    """Refuse a configuration no model can have; whoever read it from a file adds the file's name."""

    def require(ok: bool, key: str, problem: str) -> None:
        if not ok:
            raise UserError(key, problem, "Correct the configuration.")

    def positive(value: int, key: str) -> None:
        require(isinstance(value, int) and 0 < value < 2**31, key, f"must be a positive whole number, not {value!r}")

    for key in ("vocab", "hidden", "context"):
        positive(getattr(config, key), key)
    require(0 < len(config.layers) <= 10_000, "layers", f"{len(config.layers)} layers")
    require(config.norm_eps > 0, "norm_eps", f"must be above zero, not {config.norm_eps}")
    require(config.init_std >= 0, "init_std", f"must not be negative, but is {config.init_std}")

    attention, rope = config.attention, config.rope
    positive(attention.heads, "attention heads")
    if isinstance(attention, GroupedQuery):
        positive(attention.kv_heads, "key/value heads")
        positive(attention.head_size, "head size")
        require(
            attention.heads % attention.kv_heads == 0,
            "key/value heads",
            f"{attention.heads} query heads do not divide into {attention.kv_heads} key/value heads",
        )
        turning = attention.head_size
    else:
        for key in ("kv_rank", "plain_size", "rope_size", "value_size"):
            positive(getattr(attention, key), key)
        if attention.q_rank is not None:
            positive(attention.q_rank, "q_rank")
        if attention.indexer:
            for key in ("heads", "head_size", "topk"):
                positive(getattr(attention.indexer, key), f"indexer {key}")
            require(attention.q_rank is not None, "q_rank", "the indexer reads the query latent, so q_rank is needed")
            require(
                attention.indexer.head_size >= attention.rope_size, "indexer head_size", "smaller than its rotary part"
            )
        turning = attention.rope_size
    encoder = config.encoder
    if encoder is not None:
        require(isinstance(attention, GroupedQuery), "attention", "an encoder has no latent attention")
        require(not config.mtp and not config.has_experts, "layers", "an encoder has dense layers only")
        require(
            encoder.positions == 0 or config.context + encoder.first_position <= encoder.positions,
            "positions",
            f"{encoder.positions} for a context of {config.context}",
        )
        if encoder.classifier is not None:
            labels = encoder.classifier.labels
            require(0 <= labels < 2**20, "labels", f"{labels}")
    require(
        (0 if encoder and encoder.positions else 1) <= rope.size <= turning and rope.size % 2 == 0,
        "rotary size",
        f"must be even and at most {turning}, not {rope.size}",
    )
    require(rope.theta > 0, "rope theta", f"must be above zero, not {rope.theta}")
    require(rope.factor > 0, "rope factor", f"must be above zero, not {rope.factor}")
    require(rope.kind != "dynamic" or rope.size > 2, "rotary size", "dynamic scaling needs more than two dimensions")
    if rope.original_context is not None:
        positive(rope.original_context, "rope original context")
    if rope.kind == "yarn":
        require(rope.theta > 1, "rope theta", f"must be above one for yarn, not {rope.theta}")
        require(rope.beta_fast > 0 and rope.beta_slow > 0, "rope beta_fast, beta_slow", "must be above zero")
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        require(0 < low and 0 < high and low != high, "rope low_freq_factor, high_freq_factor", f"are {low} and {high}")
    for key in ("mscale", "mscale_all_dim"):
        require((getattr(rope, key) or 0) >= 0, f"rope {key}", f"must not be negative, but is {getattr(rope, key)}")

    for number, layer in enumerate(config.layers + config.mtp):
        ffn, here = layer.ffn, f"layer {number}"
        positive(ffn.hidden, f"{here} feed-forward hidden size")
        if layer.window is not None:
            positive(layer.window, f"{here} window")
        require(not layer.chunked or layer.window is not None, f"{here} chunks", "need a window, which is their size")
        if layer.temperature is not None:
            positive(layer.temperature.floor, f"{here} temperature floor")
        if layer.delta is not None:
            for key, size in dataclasses.asdict(layer.delta).items():
                positive(size, f"{here} delta rule {key}")
            heads, shared = layer.delta.heads, layer.delta.key_heads
            require(heads % shared == 0, f"{here} delta rule", f"{heads} heads do not divide into {shared} key heads")
            require(layer.delta.width > 1, f"{here} delta rule", "its convolution needs a token before each")
            plain = not config.mtp and config.encoder is None and config.infilling is None
            require(plain, f"{here} delta rule", "is for models that read and predict one token after the other")
        if isinstance(ffn, Experts):
            positive(ffn.count, f"{here} experts")
            require(
                0 < ffn.per_token <= ffn.count, f"{here} experts per token", f"{ffn.per_token} of {ffn.count} experts"
            )
            require(
                ffn.groups > 0 and ffn.count % ffn.groups == 0,
                f"{here} expert groups",
                f"{ffn.count} experts do not divide into {ffn.groups} groups",
            )
            require(0 < ffn.top_groups <= ffn.groups, f"{here} top groups", f"{ffn.top_groups} of {ffn.groups} groups")
            per_group = ffn.count // ffn.groups
            require(
                ffn.per_token <= per_group * ffn.top_groups,
                f"{here} experts per token",
                f"{ffn.per_token} do not fit in {ffn.top_groups} groups of {per_group}",
            )
            require(
                ffn.score == "softmax" or per_group >= 2 or ffn.groups == 1,
                f"{here} expert groups",
                "a group is scored by its two best experts, so it needs at least two",
            )
            if ffn.shared_hidden != 0:
                positive(ffn.shared_hidden, f"{here} shared expert's hidden size")
            require(not ffn.residual or ffn.shared_hidden > 0, f"{here} residual expert", "needs a shared expert")
            require(not ffn.shared_gate or ffn.shared_hidden > 0, f"{here} shared gate", "needs a shared expert")
            require(not ffn.scales_input or ffn.per_token == 1, f"{here} scaled inputs", "take one expert per token")
            require(not (ffn.residual and ffn.bias), f"{here} residual expert", "goes with experts without biases")
        if isinstance(ffn, Reading):
            require(config.knowledge is not None, f"{here} knowledge", "there is no base to read")
        require(
            layer.index is None or (isinstance(attention, Latent) and attention.indexer is not None),
            f"{here} indexer",
            "the attention has no indexer",
        )
    if config.norm_offset:
        usual = isinstance(attention, GroupedQuery) and attention.norm == "heads" and config.encoder is None
        require(usual and not config.mtp and config.knowledge is None, "norm", "an offset is for plain layers")
    if config.norm != "pre":
        require(not config.post_norms and not config.mtp, "norm", "a norm after each half is for plain layers")
    if config.infilling is not None:
        require(isinstance(attention, GroupedQuery), "infilling", "latent attention has no prefix")
        require(len(config.infilling.masks) > 0, "infilling", "there are no masks")
    if config.knowledge is not None:
        positive(config.knowledge.words, "words of a fact")
    if isinstance(attention, Latent) and attention.indexer:
        require(config.layers[0].index == "full", "layer 0 indexer", "the first layer must select its own tokens")
