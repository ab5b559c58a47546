"""Kernels in which some operations are others: whatever a subclass does not say goes to the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from moesaic.kernels.interface import Batch, Kernels, Routes
from moesaic.kernels.layer_weights import ExpertWeights


class WrappedKernels:
    def __init__(self, plain: Kernels) -> None:
        self.plain = plain

    def for_batch(self, layout: Batch, rows: int | None = None) -> Self:
        """These kernels for one forward, of which they know the layout, and how many rows of it come to them if not
        all. Those that divide rows among ranks say here which are theirs; nothing is remembered from forward to
        forward, so that several may be under way, or be computed again."""
        plain = for_batch(self.plain, layout, rows)
        if plain is self.plain:
            return self
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__, plain=plain)
        return bound

    def run_layers(self, *layers: Any) -> None:
        return None  # every operation must pass by: more than one in a call has no place for others

    def run_retained_layers(self, *layers: Any) -> None:
        return None

    def run_encoder(self, *layers: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name == "begin_experts" and hasattr(type(self), "experts"):
            raise AttributeError(name)  # the plain ones' would pass by the experts of these
        return getattr(self.plain, name)


def for_batch(kernels: Kernels, layout: Batch, rows: int | None = None) -> Kernels:
    """Kernels as a forward over this batch uses them."""
    bind = getattr(kernels, "for_batch", None)
    return kernels if bind is None else bind(layout, rows)


def begin_experts(
    kernels: Kernels, x_TD: Tensor, routes: Routes, weights: ExpertWeights
) -> Tensor | Callable[[], Tensor]:
    """Experts of other ranks are asked here and answer in `finished`; those of this device compute at once."""
    begin = getattr(kernels, "begin_experts", None)
    return kernels.experts(x_TD, routes, weights) if begin is None else begin(x_TD, routes, weights)


def finished(begun: Tensor | Callable[[], Tensor]) -> Tensor:
    return begun if isinstance(begun, Tensor) else begun()
