"""What the config.json files of encoders share: labels, how a cross-encoder's score is reported, special tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from moesaic.model.config import GroupedQuery, ModelConfig
from moesaic.model.families.keys import ACTIVATIONS, Keys, write_every
from moesaic.model.families.places import Place

CLASSIFIES = "ForSequenceClassification"
# Where sentence-transformers' CrossEncoder says what is done to the logit: now, and before its version 4.
SCORE_KEYS = ("activation_fn", "sbert_ce_default_activation_function")


def label_count(keys: Keys) -> int:
    """Labels of the head; 0 where config.json names a model without one."""
    named = keys.raw.get("architectures")
    if not isinstance(named, list) or not any(str(name).endswith(CLASSIFIES) for name in named):
        return 0
    labels = keys.raw.get("id2label")
    return keys.integer("num_labels", default=len(labels) if isinstance(labels, dict) else 2)


def score_kind(keys: Keys) -> Literal["sigmoid", "identity"]:
    """A function is named by its path in Python, which is compared and never imported."""
    told = keys.raw.get("sentence_transformers")
    told = told if isinstance(told, dict) else {}
    named = told.get(SCORE_KEYS[0]) or keys.raw.get(SCORE_KEYS[1])
    if named is None:
        return "sigmoid"
    kind = str(named).rsplit(".", 1)[-1].lower()
    if kind == "sigmoid" or kind == "identity":
        return "sigmoid" if kind == "sigmoid" else "identity"
    raise keys.wrong(SCORE_KEYS[0], "Sigmoid or Identity", named)


def activation(keys: Keys, name: str, default: str = "gelu") -> Any:
    found = keys.text(name, default=default)
    if found not in ACTIVATIONS:
        raise keys.wrong(name, f"one of {', '.join(ACTIVATIONS)}", found)
    return ACTIVATIONS[found]


def encoder_keys(keys: Keys, context: int, eps: float, act: str = "hidden_act") -> dict[str, Any]:
    """The fields of ModelConfig that every family has; an output matrix is none of an encoder's."""
    return {**keys.every(context, eps), "norm_eps": eps, "activation": activation(keys, act), "tied": False}


def write_encoder(config: ModelConfig, attention: GroupedQuery) -> dict[str, Any]:
    shared = write_every(config)
    for key in ("rms_norm_eps", "use_cache", "tie_word_embeddings"):
        del shared[key]
    return {**shared, "num_attention_heads": attention.heads, "intermediate_size": config.layers[0].ffn.hidden}


def classifier_keys(config: ModelConfig, name: str) -> dict[str, Any]:
    """Which class of `transformers` it is, and the labels it has."""
    head = config.encoder.classifier if config.encoder else None
    if head is None or not head.labels:
        return {"architectures": [f"{name}Model"]}
    path = {"sigmoid": "torch.nn.modules.activation.Sigmoid", "identity": "torch.nn.modules.linear.Identity"}
    return {
        "architectures": [f"{name}{CLASSIFIES}"],
        "id2label": {str(number): f"LABEL_{number}" for number in range(head.labels)},
        "label2id": {f"LABEL_{number}": number for number in range(head.labels)},
        "sentence_transformers": {SCORE_KEYS[0]: path[head.score]},
    }


def old_norm_names(places: Iterable[Place]) -> list[Place]:
    """As TensorFlow called the two halves of a LayerNorm."""
    ends = ((".LayerNorm.weight", ".LayerNorm.gamma"), (".LayerNorm.bias", ".LayerNorm.beta"))
    renamed = list(places)
    for now, before in ends:
        renamed = [
            replace(place, name=place.name.removesuffix(now) + before) if place.name.endswith(now) else place
            for place in renamed
        ]
    return renamed
