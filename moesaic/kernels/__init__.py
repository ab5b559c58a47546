"""One function per operation of the model, dispatched by device and mode.

`reference` is the meaning of each; the others must agree with it. A model asks once (`choose`) and passes the answer
down, so that nothing here is global and a test can run any implementation on any model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

Mode = Literal["fast", "reference", "invariant"]


class Batch(Protocol):
    """What attention needs to know of a flat batch; `moesaic.model.layout.Layout` is one."""

    @property
    def spans(self) -> list[Any]: ...

    @property
    def spans_S4(self) -> Tensor: ...

    @property
    def pages_SP(self) -> Tensor | None: ...

    @property
    def branches(self) -> bool: ...

    def write(self, slab: Tensor, new_T: Tensor) -> None: ...

    def read(self, slab: Tensor, span: Any) -> Tensor: ...

    def seen(self, span: Any, window: int | None) -> tuple[Tensor | None, int | None]: ...

    def per_sequence(self, *rows_T: Tensor) -> Iterator[tuple[Any, ...]]: ...


@dataclass(frozen=True)
class LatentRules:
    """How latent attention looks: `plain_size` numbers of a head's query and key do not turn, the others do."""

    plain_size: int
    eps: float  # of the latent's norm
    cos_TR: Tensor
    sin_TR: Tensor
    interleaved: bool
    scale: float


class RouteRules(Protocol):
    """How a router's scores become a choice; `moesaic.model.config.Experts` is one."""

    @property
    def per_token(self) -> int: ...

    @property
    def score(self) -> str: ...

    @property
    def normalize(self) -> bool: ...

    @property
    def scale(self) -> float: ...

    @property
    def groups(self) -> int: ...

    @property
    def top_groups(self) -> int: ...


class Kernels(Protocol):
    """What an implementation offers. Shapes are in the legend of `moesaic.model`."""

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor: ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...

    def rotate(self, x_THC: Tensor, cos_TR: Tensor, sin_TR: Tensor, interleaved: bool) -> Tensor:
        """Turn the first 2R dimensions of every head by each token's angles; halves in, or neighbours if interleaved;
        halves out either way, which leaves every query-key product as it was."""

    def heads(
        self,
        qkv_TXC: Tensor,
        kv_heads: int,
        q_weight_C: Tensor | None,
        k_weight_C: Tensor | None,
        eps: float,
        cos_TR: Tensor,
        sin_TR: Tensor,
        interleaved: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every token out of one projection: split, normed where there are weights, and
        queries and keys turned."""

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

    def router_logits(self, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        """How well each expert suits each token, in float32 whatever the model's format."""

    def route(
        self, logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The experts each token goes to (T, K), or those already chosen, and the weight of each."""

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

    kind = torch.device(device).type
    if mode != "reference" and kind == "cuda":
        from moesaic.kernels.cuda import fast, invariant

        return cast(Kernels, invariant if mode == "invariant" else fast)
    if mode == "reference" or kind != "cpu":
        return cast(Kernels, reference)
    from moesaic.kernels import native

    compiled = native.kernels()
    if mode == "invariant" and compiled is not None:
        from moesaic.kernels.native.invariant import InvariantKernels

        return cast(Kernels, InvariantKernels(compiled))
    return cast(Kernels, compiled or cpu)
