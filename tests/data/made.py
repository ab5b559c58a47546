"""Prepared data for tests, made in a moment: token shards whose every token is known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.data.preparation.shard_writer import ShardWriter
from moesaic.data.shards import FORMAT, MANIFEST, Shards
from moesaic.recipe import Recipe

VOCABULARY = 50_000


def make_shards(
    directory: Path,
    lengths: dict[str, Sequence[int]],
    *,
    quality: dict[str, Sequence[float]] | None = None,
    held_out: Sequence[int] = (),
    shard_tokens: int = 300,
) -> Shards:
    """Sources by name with the lengths of their documents. Tokens count up from 1 through all documents, so that each
    is different (as long as there are fewer than the vocabulary)."""
    directory.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(directory, VOCABULARY, ["quality"], shard_tokens)
    token = number = 0
    for domain, (name, sizes) in enumerate(lengths.items()):
        for at, size in enumerate(sizes):
            tokens = [(token + n) % (VOCABULARY - 1) + 1 for n in range(size)]
            value = quality[name][at] if quality else (at * 7919 % 101) / 101
            writer.append(tokens, domain, number in held_out, {"quality": value})
            token, number = token + size, number + 1
    shards = writer.finish()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "vocabulary": VOCABULARY,
        "columns": ["quality"],
        "documents": number,
        "tokens": token,
        "sources": [{"name": name} for name in lengths],
        "shards": shards,
    }
    (directory / MANIFEST).write_text(json.dumps(manifest))
    return Shards(directory)


def make_recipe(weights: dict[str, float], steps: int = 10, batch: int = 64, **data: Any) -> Recipe:
    sources = [{"name": name, "path": "-", "weight": weight} for name, weight in weights.items()]
    extra = data.pop("extra", {})
    for source in sources:
        source.update(extra.get(source["name"], {}))
    values = {
        "data": {"sources": sources, "sequence_length": 16, **data},
        "train": {"steps": steps, "batch_tokens": batch},
    }
    return Recipe.model_validate_json(json.dumps(values))


def random_lengths(seed: int, documents: int, longest: int = 60) -> list[int]:
    return np.random.RandomState(seed).randint(1, longest, documents).tolist()
