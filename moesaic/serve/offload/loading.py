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
    if offload is None:
        given = {"--expert-cache-gb": expert_cache_bytes, "--offload-from": offload_from}
        for flag, useless in given.items():
            if useless is not None:
                raise UserError(flag, "is for offloaded weights", "Add --offload experts, or leave it out.")
        return load(path, **options)
    for name, value, known in (("--offload", offload, OFFLOADS), ("--offload-from", offload_from, (None, *HOMES))):
        if value not in known:
            raise UserError(name, f'there is no "{value}"', f"Take {' or '.join(filter(None, known))}.")
    if offload == "weights":
        if expert_cache_bytes is not None:
            raise UserError("--expert-cache-gb", "is for --offload experts", "Leave it out.")
        return load(path, **options, filler=partial(fill_streamed, home=offload_from))
    return load(path, **options, filler=partial(fill_with_experts, home=offload_from, cache_bytes=expert_cache_bytes))
