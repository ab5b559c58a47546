"""ModernBERT: an encoder with RoPE, layers that look at a window between those that look everywhere, a norm before each
half of a layer (not before the first, whose input is normed) and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moesaic.model.config import Classifier, Dense, Encoder, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.families.encoders import (
    activation,
    classifier_keys,
    encoder_keys,
    label_count,
    score_kind,
    write_encoder,
)
from moesaic.model.families.keys import Keys, write_rope
from moesaic.model.families.places import Place
from moesaic.model.families.traits import Traits

ARCHITECTURE = "ModernBertModel"
TRAITS = Traits(encoder=True)
GLOBAL, LOCAL = "full_attention", "sliding_attention"
THETAS = {GLOBAL: ("global_rope_theta", 160_000.0), LOCAL: ("local_rope_theta", 10_000.0)}
NAMES = {"gelu_tanh": "gelu_pytorch_tanh"}


def read(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias", default=False)
    attention = keys.grouped_query(qkv_bias=bias, out_bias=bias)
    count, context = keys.layer_count(), keys.integer("max_position_embeddings", default=8192)
    every = max(keys.integer("global_attn_every_n_layers", default=3), 1)
    kinds = keys.choices("layer_types", {GLOBAL, LOCAL}, count) or [
        LOCAL if number % every else GLOBAL for number in range(count)
    ]
    rope, local = (_rope(keys, kind, attention.head_size, context) for kind in (GLOBAL, LOCAL))
    # Half of the window lies before a token and half behind it, and the token itself is in neither.
    window = keys.integer("local_attention", default=128) // 2 + 1
    ffn = Dense(keys.integer("intermediate_size"), bias=keys.flag("mlp_bias", default=False))
    head = None
    if labels := label_count(keys):
        pooling = keys.text("classifier_pooling", default="cls")
        if pooling not in ("cls", "mean"):
            raise keys.wrong("classifier_pooling", "cls or mean", pooling)
        head = Classifier(
            labels,
            activation=activation(keys, "classifier_activation"),
            pooling="mean" if pooling == "mean" else "cls",
            bias=keys.flag("classifier_bias", default=False),
            norm=True,
            score=score_kind(keys),
        )
    return ModelConfig(
        family="modernbert",
        attention=attention,
        rope=rope,
        layers=tuple(
            Layer(ffn, window, rope=None if local == rope else local) if kind == LOCAL else Layer(ffn)
            for kind in kinds[:count]
        ),
        encoder=Encoder(norm_bias=keys.flag("norm_bias", default=False), classifier=head),
        **encoder_keys(keys, context, keys.number("norm_eps", default=1e-5), "hidden_activation"),
    )


def _rope(keys: Keys, kind: str, head_size: int, context: int) -> Rope:
    """Newer files have one set of parameters for each kind of layer."""
    name, default = THETAS[kind]
    theta = keys.number(name, default=default)
    given = keys.raw.get("rope_parameters")
    own = given.get(kind) if isinstance(given, dict) else None
    raw = own if isinstance(own, dict) else keys.raw.get("rope_scaling") or {}
    return Keys({"rope_parameters": raw}, keys.place).rope(head_size, context=context, theta=theta)


def unused(config: ModelConfig) -> tuple[str, ...]:
    """The head that guesses words has names of a classifier's."""
    assert config.encoder is not None
    return ("decoder.",) if config.encoder.classifier else ("decoder.", "head.")


def write(config: ModelConfig) -> dict[str, Any]:
    attention, encoder, ffn = config.attention, config.encoder, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or encoder is None or not isinstance(ffn, Dense):
        return {}
    local = next((layer for layer in config.layers if layer.window), None)
    ropes = {GLOBAL: config.rope, LOCAL: (local.rope if local else None) or config.rope}
    raw = write_encoder(config, attention)
    raw["hidden_activation"] = raw.pop("hidden_act")
    head: dict[str, Any] = {}
    if (shape := encoder.classifier) is not None:
        name = NAMES.get(shape.activation, shape.activation)
        head = {"classifier_pooling": shape.pooling, "classifier_activation": name, "classifier_bias": shape.bias}
    return {
        **raw,
        "attention_bias": attention.qkv_bias,
        "mlp_bias": ffn.bias,
        "norm_eps": config.norm_eps,
        "norm_bias": encoder.norm_bias,
        "local_attention": 2 * ((local.window or 1) - 1) if local else 128,
        "layer_types": [LOCAL if layer.window else GLOBAL for layer in config.layers],
        "rope_parameters": {
            kind: write_rope(rope, attention.head_size)["rope_parameters"] for kind, rope in ropes.items()
        },
        **classifier_keys(config, "ModernBert"),
        **head,
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    classifies = config.encoder is not None and config.encoder.classifier is not None
    plain, prefixed = list(_places(config, "")), list(_places(config, "model."))
    return [prefixed, plain] if classifies else [plain, prefixed]


def _places(config: ModelConfig, prefix: str) -> Iterator[Place]:
    encoder, attention, D = config.encoder, config.attention, config.hidden
    assert encoder is not None and isinstance(attention, GroupedQuery)

    def norm(there: str, here: str) -> Iterator[Place]:
        yield Place(f"{there}.weight", (D,), f"{here}.weight")
        if encoder.norm_bias:
            yield Place(f"{there}.bias", (D,), f"{here}.bias")

    def matrix(there: str, here: str, rows: int, columns: int, bias: bool) -> Iterator[Place]:
        yield Place(f"{there}.weight", (rows, columns), f"{here}.weight")
        if bias:
            yield Place(f"{there}.bias", (rows,), f"{here}.bias")

    yield Place(f"{prefix}embeddings.tok_embeddings.weight", (config.vocab, D), "embed")
    yield from norm(f"{prefix}embeddings.norm", "entry.norm")
    for number, layer in enumerate(config.layers):
        there, here, ffn = f"{prefix}layers.{number}", f"layers.{number}", layer.ffn
        assert isinstance(ffn, Dense)
        width, bias = attention.heads * attention.head_size, attention.qkv_bias
        if number:
            yield from norm(f"{there}.attn_norm", f"{here}.attention_norm")
        yield from matrix(f"{there}.attn.Wqkv", f"{here}.attention.qkv", 3 * width, D, bias)
        yield from matrix(f"{there}.attn.Wo", f"{here}.attention.out", D, width, bias)
        yield from norm(f"{there}.mlp_norm", f"{here}.ffn_norm")
        yield from matrix(f"{there}.mlp.Wi", f"{here}.ffn.gate_up", 2 * ffn.hidden, D, ffn.bias)
        yield from matrix(f"{there}.mlp.Wo", f"{here}.ffn.down", D, ffn.hidden, ffn.bias)
    yield from norm(f"{prefix}final_norm", "norm")
    if (head := encoder.classifier) is not None:
        yield from matrix("head.dense", "classifier.dense", D, D, head.bias)
        yield from norm("head.norm", "classifier.norm")
        yield from matrix("classifier", "classifier.out", head.labels, D, True)
