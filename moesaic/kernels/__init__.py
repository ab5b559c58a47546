"""One function per operation of the model, dispatched by device and mode.

`reference` is the meaning of each; the others must agree with it. A model asks once (`choose`) and passes the answer
down, so that nothing here is global and a test can run any implementation on any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

Mode = Literal["fast", "reference"]


class Batch(Protocol):
    """What attention needs to know of a flat batch; `moesaic.model.layout.Layout` is one."""

    @property
    def spans(self) -> list[Any]: ...

    def write(self, slab: Tensor, new_T: Tensor) -> None: ...

    def read(self, slab: Tensor, span: Any) -> Tensor: ...

    def seen(self, span: Any, window: int | None) -> tuple[Tensor | None, int | None]: ...

    def per_sequence(self, *rows_T: Tensor) -> Iterator[tuple[Any, ...]]: ...


class Kernels(Protocol):
    """What an implementation offers. Shapes are in the legend of `moesaic.model`."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
        """Turn the first 2R dimensions of every head by each token's angles; halves in, or neighbours if interleaved;
        halves out either way, which leaves every query-key product as it was."""

    def attention(
        self,
        q_THC: Tensor,
        k_MNC: Tensor,
        v_MNX: Tensor,
        scale: float,
        window: int | None = None,
        keep_TM: Tensor | None = None,
    ) -> Tensor:
        """One sequence: its last T tokens attend to its M tokens, in order, at most `window` back, and only to those
        that `keep` selects."""

    def attend(
        self,
        q_THC: Tensor,
        k_TNC: Tensor,
        v_TNC: Tensor,
        layout: Batch,
        slabs: dict[str, Tensor] | None,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """A whole flat batch: new keys and values go to the cache where there is one, then every token attends to its
        own sequence so far."""

    def gated(self, gate_up_TG: Tensor, activation: str) -> Tensor:
        """activation(first half) * second half."""

    def experts(
        self,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
        activation: str,
    ) -> Tensor:
        """The weighted sum of each token's routed experts."""


def choose(device: torch.device | str, mode: Mode = "fast") -> Kernels:
    from moesaic.kernels import cpu, reference

    if mode == "reference" or torch.device(device).type != "cpu":
        return cast(Kernels, reference)
    return cast(Kernels, cpu)
