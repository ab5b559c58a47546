"""What `moesaic show` reports of a model directory: parameters, layers, memory, and its life so far.

summary = model_summary(Path("out/smollm2"))
for name, value in rows(summary): print(name, value)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.model import lineage
from moesaic.model.facts import bits_per_weight, describe_layers, facts
from moesaic.model.formats.language_part import LanguagePart
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import is_compressed, open_checkpoint
from moesaic.model.value_head import has_head
from moesaic.units import readable_bytes, readable_count


def model_summary(directory: Path) -> dict[str, Any]:
    source = open_checkpoint(directory)
    config, _ = match(source)
    known = facts(config)
    return {
        "directory": str(directory),
        "family": config.family,
        "parameters": known.parameters,
        "active_parameters": known.active_parameters,
        "prediction_parameters": known.prediction_parameters,
        "layers": len(config.layers),
        "layer_kinds": describe_layers(config),
        "hidden": config.hidden,
        "vocab": config.vocab,
        "experts": max((getattr(layer.ffn, "count", 0) for layer in config.layers), default=0),
        "experts_per_token": max((getattr(layer.ffn, "per_token", 0) for layer in config.layers), default=0),
        "context": config.context,
        "encoder": config.encoder is not None,
        "labels": config.encoder.classifier.labels if config.encoder and config.encoder.classifier else 0,
        "dtype": config.dtype,
        "disk_bytes": source.bytes,
        "bits_per_weight": bits_per_weight(LanguagePart(directory), config),
        "compressed": is_compressed(source),
        "run_bytes": source.bytes if is_compressed(source) else known.run_bytes,
        "train_bytes": known.train_bytes,
        "kv_bytes_per_token": known.kv_bytes_per_token,
        "state_bytes": known.state_bytes,
        "value_head": has_head(directory),
        "life": lineage.read(directory),
    }


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """A summary as lines of text, each with its name."""
    active = f", {readable_count(summary['active_parameters'])} active per token"
    parameters = readable_count(summary["parameters"]) + (active if summary["experts"] else "")
    mtp = summary["prediction_parameters"]
    stored = f"{summary['bits_per_weight']:.2f} bits per weight" if summary["compressed"] else summary["dtype"]
    kv_bytes = readable_bytes(summary["kv_bytes_per_token"])
    cached = "" if summary["encoder"] else f", and {kv_bytes} of KV cache per token"
    cached += f", {readable_bytes(summary['state_bytes'])} per sequence" if summary["state_bytes"] else ""
    kind = "an encoder: it embeds texts" + (f", with {summary['labels']} labels" if summary["labels"] else "")
    found = [
        ("model", f"{summary['family']}, {parameters}"),
        *[("layers" if not number else "", line) for number, line in enumerate(summary["layer_kinds"])],
        *([("", kind)] if summary["encoder"] else []),
        *([("", f"{readable_count(mtp)} parameters of multi-token prediction")] if mtp else []),
        *([("", "a value head: it is a reward model or critic")] if summary["value_head"] else []),
        ("sizes", f"hidden {summary['hidden']}, vocabulary {summary['vocab']:,}, context {summary['context']:,}"),
        ("on disk", f"{readable_bytes(summary['disk_bytes'])}, {stored}"),
        ("to run", f"{readable_bytes(summary['run_bytes'])}{cached}"),
        ("to train", f"{readable_bytes(summary['train_bytes'])} (weights, gradients, AdamW; float32), and activations"),
    ]
    for stage in summary["life"]:
        details = {key: value for key, value in stage.items() if key not in ("stage", "when", "moesaic")}
        text = ", ".join(f"{key} {value}" for key, value in details.items() if isinstance(value, str | int | float))
        found.append((str(stage.get("when", "?"))[:10], f"{stage.get('stage', '?')}: {text}"))
    return found
