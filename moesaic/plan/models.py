"""Which model is meant: a name of the catalogue (`models.yaml`), a model directory, or a YAML file of bare dimensions.

layers: 48            # needed: layers, hidden, heads, vocab
hidden: 4096
heads: 32
kv_heads: 8           # default: heads
ffn: 14336            # default: four times hidden
vocab: 128256
experts: 64           # with topk and expert_hidden; shared experts have the same width
topk: 8
expert_hidden: 1408
shared: 1
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.json_files import read_json
from moesaic.plan.shape import AttentionShape, FfnShape, LatentShape, LayerShape, ModelShape
from moesaic.yaml_reader import read_yaml

CATALOGUE = Path(__file__).with_name("models.yaml")
KEYS = {
    "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts", "topk", "expert_hidden", "shared",
    "dense_layers", "gated", "tied", "positions", "window", "window_every", "mtp", "mla", "indexer", "linear", "name",
    "parallel_block", "expert_bias",
}  # fmt: skip
# Architectures whose config.json says of shared experts, biases or dense layers what others do not.
OWN_WORDS = {"moesaic", "gpt_oss", "hunyuan_v1_moe", "llama4_text", "qwen2_moe", "qwen3_next", "qwen3_5_moe_text"}
MLA_KEYS = {"q_rank", "kv_rank", "plain", "rope", "value"}
INDEXER_KEYS = {"heads", "head_dim", "topk"}
LINEAR_KEYS = {"heads", "kv_heads", "head_dim", "full_every"}
# Other names people write for the same thing.
ALIASES = {
    "gpt3-175b": "gpt-3-175b", "gpt-3": "gpt-3-175b", "gpt3": "gpt-3-175b", "gpt-175b": "gpt-3-175b",
    "megatron-530b": "megatron-529.6b", "megatron-1t": "megatron-1008b",
    "megatron-18b": "megatron-18.4b", "megatron-39b": "megatron-39.1b", "megatron-76b": "megatron-76.1b",
    "megatron-145b": "megatron-145.6b", "megatron-146b": "megatron-145.6b", "megatron-310b": "megatron-310.1b",
    "megatron-175b": "gpt-3-175b", "megatron-1000b": "megatron-1008b",
    "llama-3.1-8b": "llama-3-8b", "llama-3.1-70b": "llama-3-70b", "llama-3.1-405b": "llama-3-405b",
    "llama-3.3-70b": "llama-3-70b", "deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3",
    "kimi-k2.5": "kimi-k2", "mixtral": "mixtral-8x7b", "qwen3-30b": "qwen3-30b-a3b", "qwen3-235b": "qwen3-235b-a22b",
    "minimax-m2.5": "minimax-m2", "smollm2": "smollm2-135m",
}  # fmt: skip


def load_model(name: str) -> ModelShape:
    path = Path(name)
    if path.is_dir():
        return from_directory(path)
    if path.suffix in {".yaml", ".yml"} or path.is_file():
        if not path.is_file():
            raise UserError(
                name, "no such file", "Give a YAML file of dimensions, a model directory or a model's name."
            )
        return from_dimensions(read_yaml(path.read_text(), str(path)), str(path), path.stem)
    wanted = canonical(name)
    known = {canonical(key): key for key in catalogue()}
    known |= {canonical(other): key for other, key in ALIASES.items()}
    if wanted in known:
        return from_dimensions(catalogue()[known[wanted]], CATALOGUE.name, known[wanted])
    close = difflib.get_close_matches(wanted, known, 3, 0.5)
    near = list(dict.fromkeys(known[key] for key in close))
    remedy = f"Did you mean {' or '.join(near)}? " if near else f"Known are {', '.join(catalogue())}. "
    raise UserError(
        f"--model {name}", "no model of this name", remedy + "A model directory or a YAML file of dimensions works too."
    )


def canonical(name: str) -> str:
    """`zai-org/GLM-4.5-Air-FP8`, `glm4.5_air` and `GLM-4.5-Air` are one name."""
    bare = name.rsplit("/", 1)[-1].lower().replace("meta-", "")
    bare = re.sub(r"[-_](instruct|base|hf|v0\.\d|it|chat|fp8|nvfp4|fp4|bf16|int4|awq|gptq)(?=$|[-_])", "", bare)
    return re.sub(r"[^a-z0-9.]", "", bare)


@cache
def catalogue() -> dict[str, dict[str, Any]]:
    return read_yaml(CATALOGUE.read_text(), CATALOGUE.name)


def from_dimensions(given: Any, place: str, name: str) -> ModelShape:
    if not isinstance(given, dict):
        raise UserError(place, "not a list of dimensions", "Write `layers: 48`, `hidden: 4096`, ... one a line.")
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), KEYS, 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(sorted(KEYS))}."
        raise UserError(f"{place}: {unknown[0]}", "unknown key", hint)

    def number(key: str, default: int | None = None, low: int = 1, inside: dict[str, Any] = given) -> int:
        value = inside.get(key, default)
        if value is None:
            raise UserError(f"{place}: {key}", "is missing", "A model needs layers, hidden, heads and vocab at least.")
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**40:
            raise UserError(f"{place}: {key}", f"must be a whole number from {low} on, not {value!r}")
        return value

    hidden, heads = number("hidden"), number("heads")
    layers, dense = number("layers"), number("dense_layers", 0, 0)
    if "head_dim" not in given and "mla" not in given and hidden % heads:
        raise UserError(f"{place}: heads", f"{heads} heads do not divide hidden = {hidden}", "Give head_dim.")
    attention = _attention(given, number, place)
    width = number("ffn", 4 * hidden)
    # Four times hidden is the plain two-matrix form; gated ones are narrower or wider than that.
    gated = bool(given.get("gated", width != 4 * hidden or bool(given.get("experts"))))
    plain = FfnShape(width, gated)
    mixture = plain
    if experts := number("experts", 0, 0):
        expert_hidden = number("expert_hidden", width)
        shared = number("shared", 0, 0) * expert_hidden
        biased = bool(given.get("expert_bias", False))
        mixture = FfnShape(expert_hidden, gated, experts, number("topk"), shared, biased)
        if mixture.topk > experts:
            raise UserError(f"{place}: topk", f"{mixture.topk} of {experts} experts cannot be chosen")
    if dense > layers:
        raise UserError(f"{place}: dense_layers", f"{dense} of {layers} layers")
    every = number("window_every", 1)
    full = _with_window(attention, None)
    linear, full_every = _linear(given.get("linear"), number, place)
    built = tuple(
        LayerShape(
            linear if linear and (index + 1) % full_every else attention if index % every == 0 else full,
            plain if index < dense else mixture,
        )
        for index in range(layers)
    )
    return ModelShape(
        str(given.get("name", name)),
        hidden,
        number("vocab"),
        built,
        bool(given.get("tied", False)),
        number("positions", 0, 0),
        built[-1:] * number("mtp", 0, 0),
        bool(given.get("parallel_block", False)),
    )


def _attention(given: dict[str, Any], number: Any, place: str) -> AttentionShape:
    heads = number("heads")
    window = number("window") if given.get("window") else None
    if low := given.get("mla"):
        if not isinstance(low, dict) or set(low) - MLA_KEYS:
            raise UserError(f"{place}: mla", f"needs the keys {', '.join(sorted(MLA_KEYS))}")
        plain, rope = number("plain", inside=low), number("rope", inside=low)
        q_rank = number("q_rank", inside=low) if low.get("q_rank") else None
        latent = LatentShape(q_rank, number("kv_rank", inside=low), rope)
        index = given.get("indexer") or {}
        if not isinstance(index, dict) or set(index) - INDEXER_KEYS:
            raise UserError(f"{place}: indexer", f"needs the keys {', '.join(sorted(INDEXER_KEYS))}")
        extra = (
            (number("topk", inside=index), number("heads", inside=index), number("head_dim", inside=index))
            if index
            else (None, 0, 0)
        )
        return AttentionShape(heads, heads, plain + rope, number("value", inside=low), window, latent, *extra)
    kv_heads = number("kv_heads", heads)
    if heads % kv_heads:
        raise UserError(f"{place}: kv_heads", f"{heads} heads do not divide into {kv_heads} key/value heads")
    size = number("head_dim", max(1, given["hidden"] // heads))
    return AttentionShape(heads, kv_heads, size, size, window)


def _linear(given: Any, number: Any, place: str) -> tuple[AttentionShape | None, int]:
    """Linear attention (gated delta rule) in all layers but every `full_every`th."""
    if not given:
        return None, 1
    if not isinstance(given, dict) or set(given) != LINEAR_KEYS:
        raise UserError(f"{place}: linear", f"needs the keys {', '.join(sorted(LINEAR_KEYS))}")
    heads, size = number("heads", inside=given), number("head_dim", inside=given)
    kv_heads, state = number("kv_heads", inside=given), heads * size * size
    return AttentionShape(heads, kv_heads, size, size, size, state=state), number("full_every", inside=given)


def _with_window(attention: AttentionShape, window: int | None) -> AttentionShape:
    return AttentionShape(**(attention.__dict__ | {"window": window}))


def from_directory(directory: Path) -> ModelShape:
    """By `config.json` as Hugging Face's architectures write it, or by the product's own reader where only that can."""
    file = directory / "config.json"
    raw = read_json(file, missing="A model directory holds config.json.")
    if raw.get("model_type") in OWN_WORDS:
        from moesaic.plan.own_models import from_own_config  # torch comes with it

        return from_own_config(raw, file)
    text = raw.get("text_config")
    return from_dimensions(
        hugging_face_dimensions(text if isinstance(text, dict) else raw, file), str(file), directory.name
    )


def hugging_face_dimensions(raw: dict[str, Any], file: Path) -> dict[str, Any]:
    def first(*keys: str) -> Any:
        return next((raw[key] for key in keys if raw.get(key) is not None), None)

    experts = first("n_routed_experts", "num_experts", "num_local_experts")
    found: dict[str, Any] = {
        "layers": first("num_hidden_layers", "n_layer"),
        "hidden": first("hidden_size", "n_embd"),
        "heads": first("num_attention_heads", "n_head"),
        "kv_heads": first("num_key_value_heads", "multi_query_group_num"),
        "head_dim": first("head_dim"),
        "ffn": first("intermediate_size", "n_inner"),
        "vocab": first("vocab_size"),
        "tied": first("tie_word_embeddings"),
        "gated": True if "hidden_act" in raw else None,
        "mtp": first("num_nextn_predict_layers"),
    }
    if experts:
        found |= {
            "experts": experts,
            "topk": first("num_experts_per_tok", "moe_topk"),
            "expert_hidden": first("moe_intermediate_size", "expert_intermediate_size", "intermediate_size"),
            "shared": first("n_shared_experts"),
            "dense_layers": first("first_k_dense_replace"),
        }
    kinds = raw.get("layer_types")
    if raw.get("sliding_window") and (raw.get("use_sliding_window", True)):
        sliding = [str(kind).startswith("sliding") for kind in kinds] if isinstance(kinds, list) else [True]
        if any(sliding):
            found |= {"window": raw["sliding_window"], "window_every": max(1, round(len(sliding) / sum(sliding)))}
    if raw.get("kv_lora_rank"):
        names = {"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "plain": "qk_nope_head_dim",
                 "rope": "qk_rope_head_dim", "value": "v_head_dim"}  # fmt: skip
        found["mla"] = {key: raw.get(name) for key, name in names.items()}
        found["kv_heads"] = found["head_dim"] = None
        if raw.get("index_topk"):
            found["indexer"] = {
                "heads": raw["index_n_heads"],
                "head_dim": raw["index_head_dim"],
                "topk": raw["index_topk"],
            }
    return {key: value for key, value in found.items() if value is not None}
