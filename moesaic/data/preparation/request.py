"""The request of a preparation: the part of a recipe that decides what the shards hold.

Weights, phases, curricula, lengths and seeds are not part of it: they may change without preparing the data again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moesaic.data.sources import Corpus, open_source
from moesaic.errors import UserError
from moesaic.recipe import Recipe

KEYS = ("tokenizer", "tokenizer_sample", "dedupe", "quality", "scores", "held_out", "shard_tokens")
SOURCE_KEYS = ("name", "path", "text", "columns", "separator", "documents")


def preparation(recipe: Recipe, corpora: Sequence[Corpus]) -> dict[str, Any]:
    """Plain values; `inputs` changes when a source's files do."""
    return {**_request(recipe), "inputs": [corpus.state() for corpus in corpora]}


def check_same(found: dict[str, Any], recipe: Recipe, out: Path, corpora: Sequence[Corpus] | None = None) -> None:
    """A UserError if what was started or finished in `out` is not what the recipe asks for now.

    Finished data may outlive its sources: where these cannot be found any more, they are not compared.
    """
    before, now = found["request"], _request(recipe)
    different = [key for key in now if before.get(key) != now[key]]
    if different:
        key = different[0]
        more = f" (and {', '.join(different[1:])})" if different[1:] else ""
        problem = f"was prepared with another {key}{more}: {_short(before.get(key), now[key])}"
        raise UserError(out, problem, "Name another --out, or remove this directory to prepare it again.")
    try:
        inputs = [corpus.state() for corpus in corpora or [open_source(source) for source in recipe.data.sources]]
    except (UserError, OSError):
        if corpora is not None:
            raise
        return
    for source, was, is_now in zip(recipe.data.sources, before["inputs"], inputs, strict=True):
        if was != is_now:
            raise UserError(
                out,
                f"the files of {source.name} ({source.path}) have changed since it was prepared from them",
                "Name another --out, or remove this directory to prepare it again.",
            )


def _request(recipe: Recipe) -> dict[str, Any]:
    data = recipe.dump()["data"]
    request = {f"data.{key}": data[key] for key in KEYS}
    request["data.sources"] = [
        {key: source[key] for key in SOURCE_KEYS} | ({"rows": source["rows"]} if source["rows"] else {})
        for source in data["sources"]
    ]
    if recipe.data.tokenizer is None:
        request["model.vocab"] = recipe.model.vocab
    return request


def _short(before: Any, now: Any) -> str:
    """The first place at which two plain values differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(key for key in [*now, *before] if before.get(key) != now.get(key))
        return f"{key} {_short(before.get(key), now.get(key))}"
    if isinstance(before, list) and isinstance(now, list):
        if len(before) != len(now):
            return f"{len(before)} entries, now {len(now)}"
        return _short(*next((a, b) for a, b in zip(before, now) if a != b))
    return f"{before}, now {now}"
