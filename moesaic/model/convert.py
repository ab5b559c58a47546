"""Convert any model to a model directory, with the step in its lineage; a dense model can be upcycled on the way.

convert_model("smollm2", Path("out/mixture"), upcycle="experts=4,topk=2")
"""

from __future__ import annotations

from pathlib import Path

import torch

from moesaic.atomic import refuse_to_overwrite
from moesaic.errors import UserError
from moesaic.json_files import read_bytes
from moesaic.model import directory, lineage
from moesaic.model.config import ModelConfig
from moesaic.model.formats.checkpoint import KNOWLEDGE, Source
from moesaic.model.formats.matching import match
from moesaic.model.knowledge import facts_of
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.upcycle import Upcycle
from moesaic.model.upcycle import upcycle as write_upcycled


def convert_model(
    source: str,
    out: Path,
    *,
    upcycle: str | None = None,
    knowledge: Path | None = None,
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
    facts = None if knowledge is None else {KNOWLEDGE: checked_facts(opened, knowledge)}
    given = (("upcycle", upcycle), ("knowledge", knowledge and knowledge.name), ("dtype", dtype))
    options = {name: value for name, value in given if value}
    life = lineage.read(opened.place) if opened.place.is_dir() else []
    life = [*life, lineage.stage("convert", source=Path(source).name, **options)]
    if settings is None:
        return directory.convert(opened, out, life=life, dtype=kind, files=facts, progress=progress)
    return write_upcycled(opened, out, settings, life=life, dtype=kind, progress=progress)


def checked_facts(source: Source, file: Path) -> bytes:
    """The text of a knowledge base that the model can read."""
    config, tokenizer = match(source)[0], Tokenizer.from_files(source.files, source.place)
    if config.knowledge is None or tokenizer is None:
        problem = "the model reads no knowledge base: its facts are in its weights"
        raise UserError("--knowledge", problem, "Train one with model.knowledge (recipes/knowledge.yaml).")
    content = read_bytes(file)
    if content is None:
        raise UserError(file, "no such file", "Name a text with one fact in each line.")
    facts_of(content.decode("utf-8", "replace"), tokenizer, config.knowledge.words, file)
    return content
