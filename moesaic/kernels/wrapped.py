"""Kernels in which some operations are others: whatever a subclass does not say goes to the plain ones."""

from __future__ import annotations

from typing import Any, Self

from moesaic.kernels.interface import Batch, Kernels


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def for_batch(kernels: Kernels, layout: Batch, rows: int | None = None) -> Kernels:
    """Kernels as a forward over this batch uses them."""
    bind = getattr(kernels, "for_batch", None)
    return kernels if bind is None else bind(layout, rows)
