"""The sections of a recipe and their keys. Each belongs to its stage: a key is added when what reads it is written."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator

from moesaic.methods import Method
from moesaic.recipe_offload import OffloadSection
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
    topk: Count = Field(
        2048, description="tokens that are picked; at least model.context, since nothing trains a fresh indexer"
    )
    share: Count = Field(1, description="consecutive layers that share one selection")


class ModelSection(Section):
    """The sizes of a model that is trained from scratch."""

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
    dense_layers: int = Field(1, ge=0, description="first layers with a dense feed-forward network instead of experts")
    dense_hidden: Count = 1024
    experts: Count | Annotated[tuple[Count, ...], Field(min_length=1)] = Field(
        8, description="routed experts per layer, or one number for each MoE layer"
    )
    experts_per_token: Count = 2
    expert_hidden: Count = 256
    shared_experts: int = Field(1, ge=0, description="shared experts, used by every token")
    router: RouterSection = RouterSection()
    mtp_layers: int = Field(0, ge=0, description="multi-token prediction layers")
    rope_theta: float = Field(10_000.0, gt=0)
    context: Count = Field(1024, description="maximum sequence length, in tokens")
    tied: bool = Field(False, description="tie the output projection to the embedding")


class SourceSection(Section):
    """A source of training text."""

    name: str
    path: str = Field(description="a file, a folder, a pattern such as texts/*.jsonl, or builtin:NAME")
    weight: float = Field(1.0, gt=0, description="sampling weight, relative to the other sources")
    text: str = Field("text", description="the JSONL field or parquet column that holds the text")
    columns: tuple[str, ...] = Field((), description="numeric fields of its records that are kept with each document")
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


class DataSection(Section):
    """Training data: sources, tokenizer, mixture and order."""

    sources: tuple[SourceSection, ...] = ()
    tokenizer: str | None = Field(
        None, description="a tokenizer or model directory; by default one is trained on the sources"
    )
    tokenizer_sample: Count = Field(8_000_000, description="bytes of text the tokenizer is trained on")
    dedupe: DedupeSection = DedupeSection()
    quality: Named | None = Field(Method("compression"), description="method that computes the column quality")
    scores: tuple[Named, ...] = Field((), description="further columns, each computed by and named after its method")
    held_out: float = Field(0.0, ge=0, lt=1, description="share of documents held out from training, for validation")
    shard_tokens: Count = Field(1 << 26, description="tokens per shard")
    sequence_length: int = Field(1024, ge=2, description="tokens per sequence; longer documents are split")
    phases: tuple[PhaseSection, ...] = ()
    when_exhausted: Literal["reweight", "stop"] = Field(
        "reweight", description="a source at its max_epochs: the others take over its share, or the data ends"
    )
    curriculum: Named | None = None
    length_warmup: LengthWarmupSection | None = None
    seed: Seed = 0


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


class SpikeSection(Section):
    """Loss spike detection: a run with a spike is rewound to a checkpoint, and skips the data that caused it."""

    sigmas: float = Field(8.0, ge=0, description="standard deviations above the running mean; 0: no spike detection")
    patience: Count = Field(2, description="consecutive steps above that make a spike")
    max_rewinds: int = Field(5, ge=0, description="rewinds before the run stops with an error")


class TrainSection(Section):
    """The training run: length, batch size, precision, evaluation and checkpoints."""

    init: str | None = Field(None, description="a model directory to start from, in place of random weights")
    data: str | None = Field(
        None, description="a prepared data directory; by default the recipe's data is prepared first"
    )
    objective: Named = Method("next_token")
    steps: Steps = 1000
    batch_tokens: int = Field(16_384, ge=2, le=1 << 30, description="tokens per optimizer step")
    accumulate: Count = Field(1, description="gradient accumulation: micro-batches per step")
    warmup_steps: int = Field(0, ge=0, description="steps of linear learning-rate warmup")
    clip: float = Field(1.0, gt=0, description="gradient clipping: maximum gradient norm")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of the weights; auto: bfloat16 if the CPU or GPU has instructions for it"
    )
    seed: Seed = 0
    evaluate_every: int = Field(
        0, ge=0, description="steps between evaluations on held-out text (data.held_out); 0: never"
    )
    evaluate_tokens: Count = Field(65_536, description="held-out tokens per evaluation")
    save_every: Count = Field(500, description="steps between checkpoints")
    keep_last: Count = Field(2, description="latest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="also keep the checkpoint of every so many steps; 0: none")
    recompute: bool = Field(False, description="activation checkpointing: less memory, about a third more time")
    embedding_shrink: float = Field(
        1.0, gt=0, le=1, description="embedding gradient shrink: factor on the gradient of the embedding"
    )
    offload: OffloadSection | None = None
    average: AverageSection | None = None
    token_drop: TokenDropSection | None = None
    layer_drop: LayerDropSection | None = None
    spike: SpikeSection = SpikeSection()


class BalanceSection(Section):
    """Expert load balancing. Zero turns a term off."""

    bias_rate: float = Field(0.001, ge=0, description="update rate of the auxiliary-loss-free balancing bias")
    sequence_loss: float = Field(0.0, ge=0, description="weight of the sequence-wise auxiliary loss")
    z_loss: float = Field(0.0, ge=0, description="weight of the router's z-loss")


class ParallelSection(Section):
    """Many devices: started by torchrun, one process each. dp x cp x tp x pp of them; ep lies within dp x cp x tp."""

    layout: str | None = Field(None, description="a layout in one text, or the file that moesaic plan --save wrote")
    dp: int = Field(0, ge=0, description="data parallel: ranks that see other sequences; 0: all that are left")
    tp: Count = Field(1, description="tensor parallel, with sequence parallel between matmuls")
    cp: Count = Field(1, description="context parallel: ranks that share every sequence")
    pp: Count = Field(1, description="pipeline stages")
    ep: Count = Field(1, description="expert parallel: ranks that share one set of experts")
    zero: int = Field(
        2, ge=0, le=3, description="0: data ranks hold everything; 1, 2: FSDP; 3: parameters gathered layer by layer"
    )
    interleave: Count = Field(1, description="chunks of layers per pipeline rank")
    exact: bool = Field(
        False, description="add up in the order of ranks: the bits of one process that accumulates (dp, ep)"
    )
    chunks: Count = Field(1, description="groups of a rank's experts whose tokens travel while others compute")
    dispatch: Literal["plain", "once", "node"] = Field(
        "plain", description="once: a token crosses to a rank once, however many experts there want it; node: to a node"
    )
    node_ranks: int = Field(0, ge=0, description="ranks of each node, for dispatch=node; 0: as torchrun says")
    context: Literal["ulysses", "mesh", "ring"] = Field(
        "ulysses", description="context parallel: by heads (all-to-all), or by tiles of queries and keys"
    )
    replicas: Count = Field(1, description="HSDP: copies of what FSDP divides, as between nodes; divides dp")
    shadow: Natural | Literal["auto"] = Field(
        0, description="copy so many experts, those most tokens want, to all ranks; auto: where it sends less"
    )
    tiles: Count = Field(1, description="tensor parallel: tiles of rows that travel while others are multiplied")
    regather: bool = Field(
        False, description="tensor parallel: gather rows again in the backward pass, not keep them (memory for bytes)"
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = Field(
        "1f1b", description="of a pipeline; its micro-batches are train.accumulate"
    )
    stages: tuple[int, ...] = Field((), description="layers of each pipeline stage; by default as equal as can be")
    timeout: float = Field(
        600.0, gt=0, description="seconds within which a rank that holds the others up is named, and the run ended"
    )
    trace: bool = Field(False, description="record what every rank does when, and report who is slow; takes time")
    trace_every: Count = Field(10, description="steps between two reports of who is slow")
    redundancy: bool = Field(False, description="keep every rank's state in its neighbour's memory: no step is lost")
    redundancy_folder: str | None = Field(
        None, description="where, on each machine; by default its shared memory (/dev/shm)"
    )


class AlignSection(Section):
    """Alignment: stages, in order."""

    stages: tuple[Named, ...] = Field((), description="sft, preference, policy, ... with their options")
    invariant: bool = Field(
        True, description="batch-invariant kernels: trainer and engine agree to the bit in RL stages"
    )
