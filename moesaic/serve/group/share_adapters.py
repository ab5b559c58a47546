"""A LoRA adapter on a rank: the down matrix whole, of the up matrix the rows that this rank's matrix has."""

from __future__ import annotations

from pathlib import Path

from moesaic.model.transformer import Model
from moesaic.serve.core.adapters import Adapter, load_adapter
from moesaic.serve.group.shares import Share
from moesaic.serve.group.worker_group import WorkerGroup


def load_adapter_share(model: Model, group: WorkerGroup, path: str | Path, name: str) -> Adapter:
    share, corrections = Share(model.config, group.layout, group.rank), {}
    whole = load_adapter(model, path, name)
    for site, (down_RI, up_OR) in whole.corrections.items():
        part = share.part(f"{site}.weight", up_OR.shape)
        corrections[site] = (down_RI, up_OR if part is None else part.take(up_OR))
    return Adapter(name, corrections, whole.digest)
