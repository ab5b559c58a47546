"""ChatGLM2, ChatGLM3 and GLM-4-9B as first released: the model of `glm` under other config keys and tensor names."""

from __future__ import annotations

from typing import Any

from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.families.keys import Keys, write_every
from moesaic.model.families.places import Place
from moesaic.model.families.traits import Traits

ARCHITECTURE = "ChatGLMModel"
TRAITS = Traits(rotary_share=0.5, interleaved=True)
THETA = 10_000.0  # times rope_ratio
# Its own names of what all have.
NAMES = {
    "num_hidden_layers": "num_layers",
    "vocab_size": "padded_vocab_size",
    "rms_norm_eps": "layernorm_epsilon",
    "max_position_embeddings": "seq_length",
}


def read(keys: Keys) -> ModelConfig:
    for key in ("rmsnorm", "post_layer_norm", "original_rope"):
        if not keys.flag(key, default=True):
            raise keys.wrong(key, "true", False)
    for key in ("add_bias_linear", "apply_residual_connection_post_layernorm", "interleaved_qkv"):
        if keys.flag(key, default=False):
            raise keys.wrong(key, "false", True)
    heads = keys.integer("num_attention_heads")
    few = keys.flag("multi_query_attention", default=False)
    attention = GroupedQuery(
        heads=heads,
        kv_heads=keys.integer("multi_query_group_num") if few else heads,
        head_size=keys.integer("kv_channels", default=128),
        qkv_bias=keys.flag("add_qkv_bias", default=False) or keys.flag("add_bias_linear", default=False),
    )
    usual = Keys(keys.raw | {name: keys.raw[own] for name, own in NAMES.items() if own in keys.raw}, keys.place)
    return ModelConfig(
        family="chatglm",
        attention=attention,
        rope=Rope(attention.head_size // 2, THETA * keys.number("rope_ratio", default=1.0), interleaved=True),
        layers=(Layer(Dense(keys.integer("ffn_hidden_size"))),) * usual.layer_count(),
        **usual.every(usual.integer("max_position_embeddings", default=2048), eps=1e-5),
    )


def write(config: ModelConfig) -> dict[str, Any]:
    attention = config.attention
    if not isinstance(attention, GroupedQuery):
        return {}
    return {NAMES.get(name, name): value for name, value in write_every(config).items()} | {
        "num_attention_heads": attention.heads,
        "multi_query_attention": attention.kv_heads != attention.heads,
        "multi_query_group_num": attention.kv_heads,
        "kv_channels": attention.head_size,
        "add_qkv_bias": attention.qkv_bias,
        "ffn_hidden_size": config.layers[0].ffn.hidden,
        "rope_ratio": config.rope.theta / THETA,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    attention, size = config.attention, (config.vocab, config.hidden)
    assert isinstance(attention, GroupedQuery)
    wide, row = attention.heads * attention.head_size, (config.hidden,)
    rows = wide + 2 * attention.kv_heads * attention.head_size
    found = [Place("transformer.embedding.word_embeddings.weight", size, "embed")]
    for number, layer in enumerate(config.layers):
        there, here, hidden = f"transformer.encoder.layers.{number}", f"layers.{number}", layer.ffn.hidden
        found += [
            Place(f"{there}.input_layernorm.weight", row, f"{here}.attention_norm.weight"),
            Place(
                f"{there}.self_attention.query_key_value.weight", (rows, config.hidden), f"{here}.attention.qkv.weight"
            ),
            Place(f"{there}.self_attention.dense.weight", (config.hidden, wide), f"{here}.attention.out.weight"),
            Place(f"{there}.post_attention_layernorm.weight", row, f"{here}.ffn_norm.weight"),
            Place(f"{there}.mlp.dense_h_to_4h.weight", (2 * hidden, config.hidden), f"{here}.ffn.gate_up.weight"),
            Place(f"{there}.mlp.dense_4h_to_h.weight", (config.hidden, hidden), f"{here}.ffn.down.weight"),
        ]
        if attention.qkv_bias:
            found.append(Place(f"{there}.self_attention.query_key_value.bias", (rows,), f"{here}.attention.qkv.bias"))
    found.append(Place("transformer.encoder.final_layernorm.weight", row, "norm.weight"))
    found.append(Place("transformer.output_layer.weight", size, "embed" if config.tied else "head", copy=config.tied))
    return [found]


def unused(config: ModelConfig) -> tuple[str, ...]:
    """The angles of RoPE, which some checkpoints store."""
    return ("transformer.rotary_pos_emb.",)
