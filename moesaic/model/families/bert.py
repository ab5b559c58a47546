"""BERT and what shares its form (MiniLM, E5, BGE, ms-marco cross-encoders): an encoder with learned positions, token
types, a norm after each half of a layer and an ungated feed-forward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from moesaic.model.config import Classifier, Dense, Encoder, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.families.encoders import (
    classifier_keys,
    encoder_keys,
    label_count,
    old_norm_names,
    score_kind,
    write_encoder,
)
from moesaic.model.families.keys import Keys
from moesaic.model.families.places import Place
from moesaic.model.families.traits import Traits

ARCHITECTURE = "BertModel"
TRAITS = Traits(encoder=True)


def read(keys: Keys) -> ModelConfig:
    kind = keys.text("position_embedding_type", default="absolute")
    if kind != "absolute":
        raise keys.wrong("position_embedding_type", "'absolute'", kind)
    if keys.flag("is_decoder", default=False):
        raise keys.wrong("is_decoder", "false", True)
    return read_bert(keys, "bert", keys.integer("max_position_embeddings", default=512))


def read_bert(keys: Keys, family: str, positions: int, first: int = 0) -> ModelConfig:
    """`first` is the row of the position table that a text begins at."""
    attention = keys.grouped_query(qkv_bias=True, out_bias=True)
    types = keys.integer("type_vocab_size", default=2)
    labels = label_count(keys)
    encoder = Encoder(norm_after=True, positions=positions, first_position=first, token_types=types)
    return ModelConfig(
        family=family,
        attention=attention,
        rope=Rope(0),
        layers=(Layer(Dense(keys.integer("intermediate_size"), bias=True, gated=False)),) * keys.layer_count(),
        encoder=replace(encoder, classifier=Classifier(labels, score=score_kind(keys))),
        **encoder_keys(keys, positions - first, eps=keys.number("layer_norm_eps", default=1e-12)),
    )


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Heads that guess words, or whether a sentence follows: nothing here asks them."""
    return ("cls.",)


def as_stored(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    """Nothing but the tensors says whether a model has a pooler."""
    assert config.encoder is not None and config.encoder.classifier is not None
    if config.encoder.classifier.labels or any(name.endswith("pooler.dense.weight") for name in names):
        return config
    return replace(config, encoder=replace(config.encoder, classifier=None))


def write(config: ModelConfig) -> dict[str, Any]:
    return {**write_bert(config), **classifier_keys(config, "Bert")}


def write_bert(config: ModelConfig) -> dict[str, Any]:
    attention, encoder = config.attention, config.encoder
    if not isinstance(attention, GroupedQuery) or encoder is None:
        return {}
    return {
        **write_encoder(config, attention),
        "max_position_embeddings": encoder.positions,
        "type_vocab_size": encoder.token_types,
        "layer_norm_eps": config.norm_eps,
        "position_embedding_type": "absolute",
    }


def layouts(config: ModelConfig) -> list[list[Place]]:
    labels = config.encoder.classifier.labels if config.encoder and config.encoder.classifier else 0
    plain, prefixed = list(_places(config, "")), list(_places(config, "bert."))
    ways = [prefixed, plain] if labels else [plain, prefixed]
    return ways + [old_norm_names(way) for way in ways]  # the first checkpoints, of 2018


def _places(config: ModelConfig, prefix: str) -> Iterator[Place]:
    yield from body_places(config, prefix)
    assert config.encoder is not None
    if (head := config.encoder.classifier) is not None:
        D = config.hidden
        yield Place(f"{prefix}pooler.dense.weight", (D, D), "classifier.dense.weight")
        yield Place(f"{prefix}pooler.dense.bias", (D,), "classifier.dense.bias")
        if head.labels:
            yield Place("classifier.weight", (head.labels, D), "classifier.out.weight")
            yield Place("classifier.bias", (head.labels,), "classifier.out.bias")


def body_places(config: ModelConfig, prefix: str) -> Iterator[Place]:
    """All but the head."""
    encoder, attention, D = config.encoder, config.attention, config.hidden
    assert encoder is not None and isinstance(attention, GroupedQuery)
    there = f"{prefix}embeddings"
    yield Place(f"{there}.word_embeddings.weight", (config.vocab, D), "embed")
    yield Place(f"{there}.position_embeddings.weight", (encoder.positions, D), "entry.positions")
    yield Place(f"{there}.token_type_embeddings.weight", (encoder.token_types, D), "entry.types")
    yield from _norm(f"{there}.LayerNorm", "entry.norm", D)
    for number, layer in enumerate(config.layers):
        there, here, width = (
            f"{prefix}encoder.layer.{number}",
            f"layers.{number}",
            attention.heads * attention.head_size,
        )
        for at, name in enumerate(("query", "key", "value")):
            rows = slice(at * width, (at + 1) * width)
            yield Place(f"{there}.attention.self.{name}.weight", (width, D), f"{here}.attention.qkv.weight", (rows,))
            yield Place(f"{there}.attention.self.{name}.bias", (width,), f"{here}.attention.qkv.bias", (rows,))
        yield from _matrix(f"{there}.attention.output.dense", f"{here}.attention.out", (D, width))
        yield from _norm(f"{there}.attention.output.LayerNorm", f"{here}.attention_norm", D)
        yield from _matrix(f"{there}.intermediate.dense", f"{here}.ffn.up", (layer.ffn.hidden, D))
        yield from _matrix(f"{there}.output.dense", f"{here}.ffn.down", (D, layer.ffn.hidden))
        yield from _norm(f"{there}.output.LayerNorm", f"{here}.ffn_norm", D)


def _matrix(there: str, here: str, shape: tuple[int, int]) -> Iterator[Place]:
    yield Place(f"{there}.weight", shape, f"{here}.weight")
    yield Place(f"{there}.bias", shape[:1], f"{here}.bias")


def _norm(there: str, here: str, size: int) -> Iterator[Place]:
    yield Place(f"{there}.weight", (size,), f"{here}.weight")
    yield Place(f"{there}.bias", (size,), f"{here}.bias")
