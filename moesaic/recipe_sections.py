"""The sections of a recipe and their keys. Each belongs to its stage: a key is added when what reads it is written."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator

from moesaic.methods import Method
from moesaic.recipe_delta import DeltaSection
from moesaic.recipe_offload import OffloadSection
from moesaic.recipe_rows import RowsSection
from moesaic.strict import STRICT, found, wrong

Count = Annotated[int, Field(gt=0)]
Natural = Annotated[int, Field(ge=0)]
Steps = Annotated[int, Field(gt=0, le=10_000_000)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
Share = Annotated[float, Field(ge=0, le=1)]


def _method(value: object) -> Method:
    if isinstance(value, Method):
        return value
    if isinstance(value, str):
        return Method(value)
    if not isinstance(value, dict):
        raise wrong(f"expected the name of a method, or its name and options, found {found(value)}")
    if not isinstance(value.get("name"), str):
        raise wrong("names no method; write name: and then its options")
    return Method(value["name"], {key: option for key, option in value.items() if key != "name"})


Named = Annotated[Method, PlainValidator(_method), PlainSerializer(Method.plain)]


class Section(BaseModel):
    model_config = STRICT

    headings: ClassVar[dict[str, str]] = {}  # the first key of each group -> what people look for who look for these


class RouterSection(Section):
    """How a token is routed to its experts."""

    score: Literal["softmax", "sigmoid"] = Field("sigmoid", description="how a router's logits become scores")
    normalize: bool = Field(True, description="the weights of the top-k experts sum to one")
    scale: float = Field(1.0, gt=0, description="factor on the output of the routed experts")
    correction: bool = Field(
        True, description="a load-balancing bias per expert, used to choose experts and not to weigh them"
    )
    groups: Count = Field(1, description="groups the experts are divided into (group-limited routing)")
    top_groups: Count = Field(1, description="groups a token may choose from")


class LatentSection(Section):
    """Multi-head latent attention (MLA): keys and values are cached as one low-rank vector per token."""

    kv_rank: Count = Field(64, description="rank of that vector")
    q_rank: Count | None = Field(96, description="rank of the query projection; null: full rank")
    plain_size: Count = Field(32, description="query and key dimensions of a head without RoPE")
    rope_size: Count = Field(16, description="those with RoPE; all heads share this part of the key")
    value_size: Count = 32


class IndexerSection(Section):
    """Sparse attention (glm_moe_dsa): a small indexer picks the tokens a query attends to."""

    heads: Count = 4
    head_size: Count = 32
    topk: Count = Field(2048, description="tokens that are picked; below model.context the indexer has to learn")
    share: Count = Field(1, description="consecutive layers that share one selection")


class KnowledgeSection(Section):
    """Layers that read an explicit, replaceable knowledge base (family moesaic)."""

    layers: tuple[Natural, ...] = Field(
        min_length=1, description="which layers, counted from 0, read in place of an FFN"
    )
    key_size: Count = Field(64, description="dimensions of queries and keys")
    words: Count = Field(8, description="tokens of a fact that are read, at most")


class ModelSection(Section):
    """The sizes of a model that is trained from scratch."""

    headings: ClassVar[dict[str, str]] = {
        "family": "shape",
        "heads": "attention",
        "dense_layers": "experts",
        "mtp_layers": "drafting for itself",
        "rope_theta": "length",
        "tied": "less memory",
    }

    family: str = Field("glm4_moe", description="the Hugging Face architecture it is saved as")
    vocab: Count = 4096
    hidden: Count = 256
    layers: Count = 6
    heads: Count = 8
    kv_heads: Count = 2
    head_size: Count = 32
    qk_norm: bool = True
    latent: LatentSection | None = Field(
        None, description="in place of kv_heads and head_size; deepseek_v3 and glm_moe_dsa have it by default"
    )
    indexer: IndexerSection | None = Field(None, description="glm_moe_dsa has it by default")
    delta: DeltaSection | None = Field(None, description="qwen3_next and qwen3_5_moe_text have it by default")
    dense_layers: int = Field(1, ge=0, description="first layers with a dense feed-forward network instead of experts")
    dense_hidden: Count = 1024
    experts: Count | Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        8, description="routed experts per layer, or one number for each MoE layer"
    )
    experts_per_token: Count = 2
    expert_hidden: Count = 256
    shared_experts: int = Field(1, ge=0, description="shared experts, used by every token")
    residual: bool = Field(
        False, description="the shared expert corrected by the routed ones, by a learned share (DeepSpeed-MoE; moesaic)"
    )
    router: RouterSection = RouterSection()
    knowledge: KnowledgeSection | None = None
    mtp_layers: int = Field(0, ge=0, description="multi-token prediction layers")
    rope_theta: float = Field(10_000.0, gt=0)
    context: Count = Field(1024, description="maximum sequence length, in tokens")
    norm: Literal["pre", "post", "deep"] = Field(
        "pre",
        description="before each half of a layer, after it, or after it by depth (DeepNorm); the last two: moesaic",
    )
    infilling: bool = Field(
        False, description="fills blanks: text up to <sop> is seen both ways (GLM); needs the objective blank_infilling"
    )
    init_std: float = Field(0.02, gt=0, description="standard deviation of the first weights; tiny models: 0.05 to 0.1")
    tied: bool = Field(False, description="tie the output projection to the embedding")


class SourceSection(Section):
    """A source of training text."""

    name: str
    path: str = Field(description="a file, a folder, a pattern such as texts/*.jsonl, or builtin:NAME")
    weight: float = Field(1.0, gt=0, description="sampling weight, relative to the other sources")
    text: str = Field("text", description="the JSONL field or parquet column that holds the text")
    columns: tuple[str, ...] = Field((), description="numeric fields of its records that are kept with each document")
    rows: RowsSection | None = None
    separator: str | None = Field(
        None, min_length=1, description="separates the documents of a text file; by default a file is one document"
    )
    documents: Count | None = Field(
        None, description="maximum number of documents; builtin tasks: how many, by default 10,000"
    )
    max_epochs: float | None = Field(None, gt=0, description="maximum number of epochs; by default unlimited")


class PhaseSection(Section):
    """A part of the run with its own data mixture."""

    share: Share = Field(description="its share of all tokens; the shares of all phases sum to one")
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        description="source: weight, in place of the source's own; a source that is not named is not sampled"
    )
    keep: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field(
        {}, description="source: share of its tokens that is kept, the best by quality (and so repeated more)"
    )


class DedupeSection(Section):
    """Deduplication of documents."""

    exact: bool = Field(True, description="drop documents equal up to case and white space")
    near: bool = Field(False, description="drop near duplicates, by MinHash LSH; about 7 kB of memory per document")
    similarity: float = Field(
        0.8, gt=0, lt=1, description="Jaccard similarity of word n-grams above which two are near duplicates"
    )
    words: Count = Field(5, description="n of those n-grams")
    hashes: int = Field(128, ge=16, le=1024, description="MinHash permutations; more are more exact, and slower")


class LengthWarmupSection(Section):
    """Sequence-length warmup: the length grows linearly to sequence_length, in multiples of 8."""

    steps: Count = Field(description="steps until sequence_length is reached")
    start: Count = Field(64, description="sequence length of the first step, in tokens")
    batch: Literal["same", "shrink"] = Field(
        "same",
        description="same: constant tokens per step; shrink: constant sequences per step, hence fewer tokens",
    )
    token_rate: bool = Field(
        True, description="where batches shrink, the learning-rate schedule counts tokens, not steps"
    )


class TopicsSection(Section):
    """Topics of documents (latent Dirichlet allocation): the columns topic and topic_share."""

    topics: int = Field(32, ge=2, le=4096, description="how many")
    iterations: Count = 100
    common: float = Field(0.25, gt=0, le=1, description="leave out tokens that are in a larger share of the documents")
    rare: Count = Field(3, description="leave out tokens that are in fewer documents")
    alpha: float = Field(0.1, gt=0, description="prior of a document's topics: the lower, the fewer it has")
    beta: float = Field(0.01, gt=0, description="prior of a topic's words")
    steps: int = Field(
        0, ge=0, le=8, description="0: topics are drawn (SaberLDA); else proposals by word and by document (WarpLDA)"
    )
    seed: Seed = 0


class DataSection(Section):
    """Training data: sources, tokenizer, mixture and order."""

    headings: ClassVar[dict[str, str]] = {
        "sources": "what is trained, on what",
        "dedupe": "the best text",
        "phases": "which text when",
        "length_warmup": "stability",
        "held_out": "evaluation and checkpoints",
    }

    sources: tuple[SourceSection, ...] = ()
    tokenizer: str | None = Field(
        None, description="a tokenizer or model directory; by default one is trained on the sources"
    )
    tokenizer_sample: Count = Field(8_000_000, description="bytes of text the tokenizer is trained on")
    shard_tokens: Count = Field(1 << 26, description="tokens per shard")
    sequence_length: int = Field(1024, ge=2, description="tokens per sequence; longer documents are split")
    dedupe: DedupeSection = DedupeSection()
    quality: Named | None = Field(Method("compression"), description="method that computes the column quality")
    scores: tuple[Named, ...] = Field((), description="further columns, each computed by and named after its method")
    topics: TopicsSection | None = None
    mix_by: str | None = Field(
        None,
        description="a column of whole numbers, such as topic: phases weigh topic0, topic1, ..., and not sources",
    )
    phases: tuple[PhaseSection, ...] = ()
    when_exhausted: Literal["reweight", "stop"] = Field(
        "reweight", description="a source at its max_epochs: the others take over its share, or the data ends"
    )
    unique_tokens: Count | None = Field(
        None, description="train on so many tokens of it alone, chosen at random: a pilot for moesaic law reuse"
    )
    reuse: str | None = Field(
        None,
        description="a law of what repetition is worth, from moesaic law reuse; by default one from the literature",
    )
    curriculum: Named | None = None
    seed: Seed = 0
    length_warmup: LengthWarmupSection | None = None
    held_out: float = Field(0.0, ge=0, lt=1, description="share of documents held out from training, for validation")


class AverageSection(Section):
    """Weight averaging over the last part of a run."""

    kind: Literal["simple", "weighted", "ema"] = "simple"
    share: Share = Field(0.2, description="share of the run, at its end, that is averaged")
    every: Count = Field(10, description="steps between the weights that enter the average")
    decay: float = Field(0.9, ge=0, lt=1, description="EMA decay")


class TokenDropSection(Section):
    """Random-LTD: middle layers process a random subset of the tokens."""

    start: float = Field(0.5, gt=0, le=1, description="share of tokens kept at the first step")
    share: Share = Field(0.7, description="share of the run after which every token is kept")
    layer_token_rate: bool = Field(
        True, description="the learning-rate schedule counts layer-tokens processed, not steps"
    )


class LayerDropSection(Section):
    """Progressive layer dropping."""

    floor: float = Field(0.5, gt=0, le=1, description="the keep probability that is approached; 1 drops nothing")
    gamma: float = Field(0.001, ge=0, description="how fast it is approached")


class IndexerTrainingSection(Section):
    """Sparse attention's indexers learn what attention looks at: dense attention at first, then the picked tokens."""

    weight: float = Field(1.0, gt=0, description="of their loss; no gradient of it reaches the rest of the model")
    warmup_steps: Natural = Field(0, description="steps in which attention is dense")
    frozen: bool | None = Field(
        None, description="only indexers learn in the warm-up; by default where train.init gives a model"
    )


class AdversarialSection(Section):
    """ScaLA: steps of a large batch are taken from embeddings moved against the model."""

    size: float = Field(0.05, gt=0, le=1, description="how far they are moved, as a share of their norm")
    delay: Share = Field(0.3, description="share of the run before it begins")
    every: Count = Field(1, description="then in one step of so many; such a step takes about 1.7 times as long")


class ReplayChoiceSection(Section):
    """Miro: RAM and replay are chosen while the run goes on, by trials: the cheapest of those that do as well."""

    every: Count = Field(500, description="steps from one choice to the next")
    steps: Count = Field(10, description="steps that each setting is tried for, and that are then undone")
    replay: tuple[Annotated[float, Field(ge=0, le=4)], ...] = Field(
        (0.0, 0.125, 0.5), min_length=1, description="shares to try"
    )
    ram: tuple[Count, ...] = Field((), description="sizes to try with each of these; none: that of the memory")
    tolerance: float = Field(0.005, ge=0, description="loss that a trial may end with above the best; it adds up")


class MemorySection(Section):
    """Episodic memory for a stream of changing domains: what came before is replayed beside what is new."""

    ram: Count = Field(512, description="sequences in RAM, which replay draws from")
    disk: Natural = Field(16_384, description="sequences remembered in all; those not in RAM wait on disk")
    swap: Natural = Field(8, description="sequences exchanged between the two at every step, in the background")
    replay: float = Field(0.25, gt=0, le=4, description="tokens replayed, as a share of the new ones; on top of them")
    choose: ReplayChoiceSection | None = None


class SpikeSection(Section):
    """Loss spike detection: a run with a spike is rewound to a checkpoint, and skips the data that caused it."""

    sigmas: float = Field(8.0, ge=0, description="standard deviations above the running mean; 0: no spike detection")
    patience: Count = Field(2, description="consecutive steps above that make a spike")
    max_rewinds: int = Field(5, ge=0, description="rewinds before the run stops with an error")


class TrainSection(Section):
    """The training run: length, batch size, precision, evaluation and checkpoints."""

    headings: ClassVar[dict[str, str]] = {
        "init": "what is trained, on what",
        "steps": "how long, how much at a time",
        "evaluate_every": "evaluation and checkpoints",
        "clip": "stability",
        "token_drop": "cheaper steps",
        "average": "a better end",
        "memory": "domains one after the other",
        "recompute": "less memory",
    }

    init: str | None = Field(None, description="a model directory to start from, in place of random weights")
    data: str | None = Field(
        None, description="a prepared data directory; by default the recipe's data is prepared first"
    )
    objective: Named = Method("next_token")
    constraint: Named | None = Field(
        None, description="what weights are held to in training: quantized (QAT), nm (N:M sparsity by ADMM)"
    )
    indexer: IndexerTrainingSection | None = Field(
        None, description="train the indexers of sparse attention (glm_moe_dsa, deepseek_v32)"
    )
    steps: Steps = 1000
    tokens: Count | None = Field(
        None, description="length of the run in tokens, in place of steps: batches may be smaller early (length_warmup)"
    )
    batch_tokens: int = Field(16_384, ge=2, le=1 << 30, description="tokens per optimizer step")
    accumulate: Count = Field(1, description="gradient accumulation: micro-batches per step")
    warmup_steps: int = Field(0, ge=0, description="steps of linear learning-rate warmup")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        "auto", description="of the weights; auto: bfloat16 where that is fast; fp8: bfloat16, multiplied in float8"
    )
    seed: Seed = 0
    evaluate_every: int = Field(
        0, ge=0, description="steps between evaluations on held-out text (data.held_out); 0: never"
    )
    evaluate_tokens: Count = Field(65_536, description="held-out tokens per evaluation")
    save_every: Count = Field(500, description="steps between checkpoints")
    keep_last: Count = Field(2, description="latest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="also keep the checkpoint of every so many steps; 0: none")
    clip: float = Field(1.0, gt=0, description="gradient clipping: maximum gradient norm")
    embedding_shrink: float = Field(
        1.0, gt=0, le=1, description="embedding gradient shrink: factor on the gradient of the embedding"
    )
    spike: SpikeSection = SpikeSection()
    adversarial: AdversarialSection | None = None
    token_drop: TokenDropSection | None = None
    layer_drop: LayerDropSection | None = None
    average: AverageSection | None = None
    memory: MemorySection | None = None
    recompute: bool = Field(False, description="activation checkpointing: less memory, about a third more time")
    offload: OffloadSection | None = None


class BalanceSection(Section):
    """Expert load balancing. Zero turns a term off."""

    bias_rate: float = Field(0.001, ge=0, description="update rate of the auxiliary-loss-free balancing bias")
    sequence_loss: float = Field(0.0, ge=0, description="weight of the sequence-wise auxiliary loss")
    z_loss: float = Field(0.0, ge=0, description="weight of the router's z-loss")


class AlignSection(Section):
    """Alignment: stages, in order."""

    stages: tuple[Named, ...] = Field((), description="sft, preference, policy, ... with their options")
    invariant: bool = Field(
        True, description="batch-invariant kernels: trainer and engine agree to the bit in RL stages"
    )
