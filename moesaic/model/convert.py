"""Convert any model to a model directory, with the step in its lineage; a dense model can be upcycled on the way.

convert_model("smollm2", Path("out/mixture"), upcycle="experts=4,topk=2")
"""

from __future__ import annotations

from pathlib import Path

import torch

from moesaic.atomic import refuse_to_overwrite
from moesaic.errors import UserError
from moesaic.model import directory, lineage
from moesaic.model.config import ModelConfig
from moesaic.model.upcycle import Upcycle
from moesaic.model.upcycle import upcycle as write_upcycled


def convert_model(
    source: str,
    out: Path,
    *,
    upcycle: str | None = None,
    dtype: str | None = None,
    force: bool = False,
    progress: directory.Progress | None = None,
) -> ModelConfig:
    """Write `source`, which is what `directory.open_source` takes, to `out`; `force` replaces what is there."""
    settings = Upcycle.parse(upcycle) if upcycle is not None else None
    opened = directory.open_source(source)
    refuse_to_overwrite(out, opened.place)
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(out, "exists already", "Name another directory, or add --force to replace it.")
    kind: torch.dtype | None = getattr(torch, dtype) if dtype else None
    options = {name: value for name, value in (("upcycle", upcycle), ("dtype", dtype)) if value}
    life = lineage.read(opened.place) if opened.place.is_dir() else []
    life = [*life, lineage.stage("convert", source=Path(source).name, **options)]
    if settings is None:
        return directory.convert(opened, out, life=life, dtype=kind, progress=progress)
    return write_upcycled(opened, out, settings, life=life, dtype=kind, progress=progress)
