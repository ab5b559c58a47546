"""What one forward carries from layer to layer besides the hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moesaic.kernels import Kernels
from moesaic.model.layout import Layout


@dataclass
class Routing:
    """The experts chosen in each mixture layer: filled by a forward, or followed by one that replays.

    `choices[layer]` is (T, K); `logits[layer]` the router's (T, E) float32 logits, kept while `keep_logits` is set (the
    balance losses read them). `lengths` are those of the sequences, and `kept[layer]` where a layer saw only some of
    their tokens.
    """

    choices: dict[int, Tensor] = field(default_factory=dict)
    logits: dict[int, Tensor] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)
    keep_logits: bool = False
    replay: bool = False


@dataclass
class ForwardContext:
    layout: Layout
    ops: Kernels
    cos_TR: Tensor
    sin_TR: Tensor
    routing: Routing | None = None
    # Whether latent attention may take the shorter of its two ways, whose results differ in the last bits.
    absorb: bool = True
    # Native code that can run a whole layer at once, where there is such and nothing comes between its operations.
    library: Any = None
    # DSA: which tokens the last full layer selected, one (T, M) mask per sequence; None where all fit.
    selected: list[Tensor | None] | None = None

    def cache_layer(self, layer: int) -> dict[str, Tensor] | None:
        return self.layout.cache.layers[layer] if self.layout.cache is not None else None
