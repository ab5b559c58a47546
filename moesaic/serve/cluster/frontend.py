"""The engine of the front: it checks and tokenizes requests, and computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import Model
from moesaic.serve.core.encoder_engine import engine_for
from moesaic.serve.core.engine import PAGE_SIZE, Engine
from moesaic.serve.core.memory import dtype_of_cache, page_bytes


def frontend_engine(directory: Path, *, pages: int | None = None, **engine_options: Any) -> Engine:
    """An engine that validates requests and computes nothing: its weights and its KV cache are on the meta device.
    `pages`, where that is known, are how many the cache of the engine behind it has."""
    source = open_checkpoint(directory)
    config, _ = match(source)
    with torch.device("meta"):
        model = Model(config)
    model.tokenizer = Tokenizer.from_files(source.files, source.place)
    if pages is not None:
        dtype = dtype_of_cache(model, engine_options.get("cache_dtype"))
        engine_options["cache_bytes"] = pages * page_bytes(model, PAGE_SIZE, dtype)
    return engine_for(model, **engine_options)
