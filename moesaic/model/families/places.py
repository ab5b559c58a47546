"""Where a checkpoint's tensors live in the model: the one description that reading, writing and checking share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from moesaic.model.config import DeltaRule, Dense, Experts, GroupedQuery, Latent, Layer, ModelConfig

# As an index of the parameter; None is a dimension of one that the file has in addition.
Part = tuple[int | slice | None, ...]


@dataclass(frozen=True)
class Place:
    """A tensor on disk (`name`, `shape`) is `part` of a parameter of the model; no part means all of it."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    part: Part = ()
    # A second copy of a shared matrix: checked if it is there, not missed if it is not, and written for those who
    # expect it.
    copy: bool = False


def by_parameter(places: Iterable[Place]) -> dict[str, list[Place]]:
    """The places that make up each parameter, without second copies."""
    found: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        if not place.copy:
            found[place.parameter].append(place)
    return found


@dataclass(frozen=True)
class Names:
    """How a family spells the parts of its feed-forward layers."""

    mixture: str = "mlp"
    dense: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    fused_dense: bool = False  # gate and up are one matrix in dense layers
    fused_experts: bool = False  # all experts are one tensor
    correction: str = "gate.e_score_correction_bias"  # the router's balance bias
    correction_row: bool = False  # as a matrix of one row
    # Of layers without attention: hidden size, shape, prefix on disk and prefix here, to places.
    delta: Callable[[int, DeltaRule, str, str], Iterator[Place]] | None = None


def places(config: ModelConfig, names: Names) -> list[Place]:
    """The naming nearly all families share; `names` holds what differs."""
    size = (config.vocab, config.hidden)
    found = [Place("model.embed_tokens.weight", size, "embed")]
    for number, layer in enumerate(config.layers):
        found += _block(config, layer, f"model.layers.{number}", f"layers.{number}", names)
    found.append(Place("model.norm.weight", (config.hidden,), "norm.weight"))
    found.append(Place("lm_head.weight", size, "embed" if config.tied else "head", copy=config.tied))
    for number, layer in enumerate(config.mtp):
        there, here = f"model.layers.{len(config.layers) + number}", f"mtp.{number}"
        found += [
            Place(f"{there}.enorm.weight", (config.hidden,), f"{here}.token_norm.weight"),
            Place(f"{there}.hnorm.weight", (config.hidden,), f"{here}.hidden_norm.weight"),
            Place(f"{there}.eh_proj.weight", (config.hidden, 2 * config.hidden), f"{here}.join.weight"),
            Place(f"{there}.shared_head.norm.weight", (config.hidden,), f"{here}.norm.weight"),
            Place(f"{there}.embed_tokens.weight", size, "embed", copy=True),
            Place(f"{there}.shared_head.head.weight", size, "embed" if config.tied else "head", copy=True),
        ]
        found += _block(config, layer, there, f"{here}.block", names)
    return found


def _block(config: ModelConfig, layer: Layer, there: str, here: str, names: Names) -> Iterator[Place]:
    hidden = (config.hidden,)
    yield Place(f"{there}.input_layernorm.weight", hidden, f"{here}.attention_norm.weight")
    yield Place(f"{there}.post_attention_layernorm.weight", hidden, f"{here}.ffn_norm.weight")
    if config.post_norms:
        yield Place(f"{there}.post_self_attn_layernorm.weight", hidden, f"{here}.attention_post_norm.weight")
        yield Place(f"{there}.post_mlp_layernorm.weight", hidden, f"{here}.ffn_post_norm.weight")
    attention = config.attention
    if layer.delta is not None:
        assert names.delta is not None, "the family has no such layers"
        yield from names.delta(config.hidden, layer.delta, there, f"{here}.attention")
    elif isinstance(attention, GroupedQuery):
        yield from _grouped_query(config.hidden, attention, f"{there}.self_attn", f"{here}.attention", names)
    else:
        yield from _latent(config.hidden, attention, layer, f"{there}.self_attn", f"{here}.attention")
    if isinstance(layer.ffn, Dense):
        yield from _dense(config.hidden, layer.ffn, f"{there}.{names.dense}", f"{here}.ffn", names)
    elif isinstance(layer.ffn, Experts):
        yield from _experts(config.hidden, layer.ffn, f"{there}.{names.mixture}", f"{here}.ffn", names)


def _matrix(there: str, here: str, shape: tuple[int, int], bias: bool, part: slice | None = None) -> Iterator[Place]:
    rows = () if part is None else (part,)
    yield Place(f"{there}.weight", shape, f"{here}.weight", rows)
    if bias:
        yield Place(f"{there}.bias", shape[:1], f"{here}.bias", rows)


def _grouped_query(hidden: int, shape: GroupedQuery, there: str, here: str, names: Names) -> Iterator[Place]:
    start = 0
    queries = shape.heads * (2 if shape.gated else 1)
    for name, heads in (("q_proj", queries), ("k_proj", shape.kv_heads), ("v_proj", shape.kv_heads)):
        rows = heads * shape.head_size
        yield from _matrix(f"{there}.{name}", f"{here}.qkv", (rows, hidden), shape.qkv_bias, slice(start, start + rows))
        start += rows
    yield from _matrix(f"{there}.o_proj", f"{here}.out", (hidden, shape.heads * shape.head_size), shape.out_bias)
    if shape.sinks:
        yield Place(f"{there}.sinks", (shape.heads,), f"{here}.sinks")
    if shape.qk_norm and shape.norm != "unit":
        for name, own, heads in ((names.q_norm, "q_norm", shape.heads), (names.k_norm, "k_norm", shape.kv_heads)):
            size = shape.head_size * (heads if shape.norm == "whole" else 1)
            yield Place(f"{there}.{name}.weight", (size,), f"{here}.{own}.weight")


def _latent(hidden: int, shape: Latent, layer: Layer, there: str, here: str) -> Iterator[Place]:
    queries = shape.heads * shape.key_size
    if shape.q_rank:
        yield from _matrix(f"{there}.q_a_proj", f"{here}.q_down", (shape.q_rank, hidden), shape.bias)
        yield Place(f"{there}.q_a_layernorm.weight", (shape.q_rank,), f"{here}.q_norm.weight")
        yield from _matrix(f"{there}.q_b_proj", f"{here}.q_up", (queries, shape.q_rank), False)
    else:
        yield from _matrix(f"{there}.q_proj", f"{here}.q_up", (queries, hidden), False)
    latent = shape.kv_rank + shape.rope_size
    yield from _matrix(f"{there}.kv_a_proj_with_mqa", f"{here}.kv_down", (latent, hidden), shape.bias)
    yield Place(f"{there}.kv_a_layernorm.weight", (shape.kv_rank,), f"{here}.kv_norm.weight")
    expanded = shape.heads * (shape.plain_size + shape.value_size)
    yield from _matrix(f"{there}.kv_b_proj", f"{here}.kv_up", (expanded, shape.kv_rank), False)
    yield from _matrix(f"{there}.o_proj", f"{here}.out", (hidden, shape.heads * shape.value_size), shape.bias)
    indexer = shape.indexer
    if indexer and layer.index == "full":
        there, here = f"{there}.indexer", f"{here}.indexer"
        assert shape.q_rank is not None
        queries = indexer.heads * indexer.head_size
        yield Place(f"{there}.wq_b.weight", (queries, shape.q_rank), f"{here}.queries.weight")
        yield Place(f"{there}.wk.weight", (indexer.head_size, hidden), f"{here}.keys.weight")
        yield Place(f"{there}.k_norm.weight", (indexer.head_size,), f"{here}.key_norm.weight")
        yield Place(f"{there}.k_norm.bias", (indexer.head_size,), f"{here}.key_norm.bias")
        yield Place(f"{there}.weights_proj.weight", (indexer.heads, hidden), f"{here}.head_weights.weight")


def _dense(hidden: int, shape: Dense, there: str, here: str, names: Names) -> Iterator[Place]:
    width = shape.hidden
    if names.fused_dense:
        yield from _matrix(f"{there}.gate_up_proj", f"{here}.gate_up", (2 * width, hidden), shape.bias)
    else:
        yield from _matrix(f"{there}.gate_proj", f"{here}.gate_up", (width, hidden), shape.bias, slice(0, width))
        yield from _matrix(f"{there}.up_proj", f"{here}.gate_up", (width, hidden), shape.bias, slice(width, 2 * width))
    yield from _matrix(f"{there}.down_proj", f"{here}.down", (hidden, width), shape.bias)


def _experts(hidden: int, shape: Experts, there: str, here: str, names: Names) -> Iterator[Place]:
    width = shape.hidden
    yield from _matrix(f"{there}.{names.router}", f"{here}.router", (shape.count, hidden), shape.bias)
    if shape.correction:
        stored, part = ((1, shape.count), (None,)) if names.correction_row else ((shape.count,), ())
        yield Place(f"{there}.{names.correction}", stored, f"{here}.router.correction", part)
    gate_up, down = f"{here}.gate_up_EGD", f"{here}.down_EDF"
    if names.fused_experts:
        yield Place(f"{there}.experts.gate_up_proj", (shape.count, 2 * width, hidden), gate_up)
        yield Place(f"{there}.experts.down_proj", (shape.count, hidden, width), down)
        if shape.bias:
            yield Place(f"{there}.experts.gate_up_proj_bias", (shape.count, 2 * width), f"{here}.bias_EG")
            yield Place(f"{there}.experts.down_proj_bias", (shape.count, hidden), f"{here}.down_bias_ED")
    else:
        for expert in range(shape.count):
            own = f"{there}.experts.{expert}"
            yield Place(f"{own}.{names.gate}.weight", (width, hidden), gate_up, (expert, slice(0, width)))
            yield Place(f"{own}.{names.up}.weight", (width, hidden), gate_up, (expert, slice(width, 2 * width)))
            yield Place(f"{own}.{names.down}.weight", (hidden, width), down, (expert,))
    if shape.shared_hidden:
        yield from _dense(hidden, Dense(shape.shared_hidden), f"{there}.{names.shared}", f"{here}.shared", Names())
    if shape.shared_gate:
        yield from _matrix(f"{there}.shared_expert_gate", f"{here}.shared_gate", (1, hidden), False)
