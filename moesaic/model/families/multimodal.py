"""Releases that see or hear as well: which of their parts is the language model, and the family it is one of.

It is read by itself, as a model of that family, and kept so when it is written; the tensors of encoders are left where
they are. What images or speech say reaches a model as rows in place of tokens (docs/data.md), not through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moesaic.errors import UserError


@dataclass(frozen=True)
class Release:
    """`begins`: how names of its tensors begin there and in the family. `other`: how those begin that are not read."""

    family: str
    begins: Mapping[str, str]
    other: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of config.json's keys, where the family has others
    always: Mapping[str, Any] = field(default_factory=dict)  # keys that it does not have and the family asks for
    # How names of experts' gates with ups, and of their downs, end that lie so as released (and may lie so no longer).
    inputs_first: tuple[str, ...] = ()

    def name(self, there: str) -> str | None:
        """A tensor's name in the family; None for one of another part."""
        if there.startswith(self.other):
            return None
        for begin, here in self.begins.items():
            if there.startswith(begin):
                return here + there.removeprefix(begin)
        return there


QWEN, QWEN_EYES = {"model.language_model.": "model."}, ("model.visual.",)
RELEASES = {
    "qwen3_vl": Release("qwen3", QWEN, QWEN_EYES, defaults={"rope_theta": 500_000.0}),
    "qwen3_vl_moe": Release(
        "qwen3_moe",
        QWEN,
        QWEN_EYES,
        defaults={
            "rope_theta": 500_000.0,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
        },
        always={"norm_topk_prob": True},
        inputs_first=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
    "qwen3_5_moe": Release("qwen3_5_moe_text", QWEN, QWEN_EYES),
    "llama4": Release("llama4_text", {"language_model.": ""}, ("vision_model.", "multi_modal_projector.")),
}
TEXT, PARTS = "text_config", ("vision_config", "audio_config", "thinker_config")
OUTER = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def release_of(raw: dict[str, Any], place: object) -> Release | None:
    """What a config.json is of; None for a language model by itself."""
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in RELEASES and TEXT in raw:
        return RELEASES[kind]
    if TEXT in raw or any(part in raw for part in PARTS):
        problem = f"{str(kind)[:60]!r} takes more than text, and its language model is not read"
        raise UserError(place, problem, f"Of such releases those of {', '.join(RELEASES)} are.")
    return None


def language_model(raw: dict[str, Any], place: object) -> dict[str, Any]:
    """The config.json of the language model in a release; any other as it is."""
    release = release_of(raw, place)
    if release is None:
        return raw
    inner = raw[TEXT]
    if not isinstance(inner, dict):
        raise UserError(place, f"{TEXT}: must be a mapping, not {str(inner)[:60]!r}", "Correct the configuration.")
    if raw.get("quantization_config") or inner.get("quantization_config"):
        problem = f"quantized checkpoints of {raw['model_type']} are not read"
        raise UserError(place, problem, "Take plain weights, and `moesaic compress` them.")
    outer = {key: raw[key] for key in OUTER if raw.get(key) is not None}
    # Whether matrices are tied is the release's to say, what a text begins and ends with the language model's.
    tied = {"tie_word_embeddings": raw.get("tie_word_embeddings", inner.get("tie_word_embeddings", False))}
    found = {key: value for key, value in inner.items() if value is not None}
    return {**release.defaults, **outer, **found, **tied, **release.always, "model_type": release.family}
