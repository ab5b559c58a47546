"""One system for the whole life of a mixture-of-experts language model.

import moesaic
model = moesaic.load("out/smollm2")
model.logits([[1, 2, 3]])
moesaic.Engine(model).generate(["The capital of France is"], max_tokens=8, temperature=0.0)[0].text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.model.directory import load as load
    from moesaic.model.transformer import Model as Model
    from moesaic.serve.core.engine import Engine as Engine

__version__ = "0.1.0"

# Read when first asked for, so that `moesaic --help` and recipes do not wait for torch.
_LAZY = {
    "Engine": "moesaic.serve.core.engine",
    "Model": "moesaic.model.transformer",
    "load": "moesaic.model.directory",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
