"""What a parameter is, by its name and shape: some matrices take no weight decay, some no Muon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

Role = Literal["embedding", "head", "gate", "hidden", "vector"]

GATES = ("router", "residual", "value")  # few outputs, each a choice of its own


def role(name: str, parameter: nn.Parameter) -> Role:
    """The role of a parameter of `moesaic.model.Model`. A hidden one is a matrix, or a stack of one per expert."""
    *above, last = name.split(".")
    if parameter.dim() < 2 or "bias" in last:
        return "vector"
    if last in ("embed", "head"):
        return "embedding" if last == "embed" else "head"
    filters = last == "taps_XW"  # of a convolution, one for each channel
    return "gate" if filters or (above and above[-1] in GATES) else "hidden"


def by_decay(
    parameters: Sequence[tuple[str, nn.Parameter]], weight_decay: float, embeddings: bool
) -> list[tuple[float, list[tuple[str, nn.Parameter]]]]:
    """The parameters that decay, then those that do not, each with its weight decay and in the order given.

    Norms and biases do not: zero is not their natural value, or they are too few to need it. `embeddings` says whether
    the embedding of tokens does.
    """
    exempt = ("vector",) if embeddings else ("vector", "embedding")
    decaying = [(name, parameter) for name, parameter in parameters if role(name, parameter) not in exempt]
    others = [(name, parameter) for name, parameter in parameters if role(name, parameter) in exempt]
    return [(weight_decay, decaying), (0.0, others)]
