"""A very small reward model, whose head says something of every token."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path


@functools.cache
def reward_directory() -> Path:
    import torch

    import moesaic
    from moesaic.model import directory
    from moesaic.model.value_head import give_head
    from tests.serve.made import talking_model

    place = Path(tempfile.mkdtemp(prefix="reward-model-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    model = moesaic.load(talking_model(place / "plain"))
    torch.nn.init.normal_(give_head(model).weight, std=0.3)
    directory.save(model, place / "headed")
    return place / "headed"
