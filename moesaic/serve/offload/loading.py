"""Load a model for serving: all of it, or with its experts or its layers left where they are.

    model = load_served("out/model", offload="experts", expert_cache_bytes=2 << 30)
    engine = Engine(model)

On a CPU what is left stays on disk; for a GPU it is read into pinned host memory, if it is not to stay on disk too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

from moesaic.errors import UserError
from moesaic.model.directory import load
from moesaic.model.transformer import Model
from moesaic.serve.offload.expert_loading import fill_with_experts
from moesaic.serve.offload.layer_loading import fill_streamed
from moesaic.serve.offload.places import HOMES, Home

Offload = Literal["experts", "weights"]
OFFLOADS = ("experts", "weights")


def load_served(
    path: str | Path,
    *,
    offload: Offload | None = None,
    offload_from: Home | None = None,
    expert_cache_bytes: int | None = None,
    **options: Any,
) -> Model:
    """`options` are those of `moesaic.load`."""
    _check(offload, offload_from, expert_cache_bytes)
    if offload is None:
        return load(path, **options)
    if offload == "weights":
        return load(path, **options, filler=partial(fill_streamed, home=offload_from))
    return load(path, **options, filler=partial(fill_with_experts, home=offload_from, cache_bytes=expert_cache_bytes))


def offload_options(offload: Offload | None, home: Home | None, cache_gb: float | None) -> dict[str, Any]:
    """Of a command's flags, what `load_served` takes; nothing where nothing is offloaded."""
    if cache_gb is not None and not 0 < cache_gb < 1e9:
        raise UserError("--expert-cache-gb", f"must be above 0, not {cache_gb:g}")
    cache_bytes = None if cache_gb is None else int(cache_gb * 2**30)
    _check(offload, home, cache_bytes)
    return {} if offload is None else {"offload": offload, "offload_from": home, "expert_cache_bytes": cache_bytes}


def _check(offload: str | None, home: str | None, cache_bytes: int | None) -> None:
    """Whether these go together, before anything is loaded."""
    for name, value, known in (("--offload", offload, OFFLOADS), ("--offload-from", home, HOMES)):
        if value is not None and value not in known:
            raise UserError(name, f'there is no "{value}"', f"Take {' or '.join(known)}.")
    if cache_bytes is not None and offload != "experts":
        raise UserError("--expert-cache-gb", "is for offloaded experts", "Add --offload experts, or leave it out.")
    if home is not None and offload is None:
        raise UserError("--offload-from", "is for offloaded weights", "Add --offload, or leave it out.")
