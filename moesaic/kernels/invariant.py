"""Learn with the very bits the engine computes: native kernels forward, library gradients back.

The native kernels give a token the same bits alone and in any batch, however its sequence was split into steps. They
know no gradients. Here each of them gets one, so that the trainer's log-probability of a token is to the bit what the
engine recorded when it sampled it. Gradients themselves are ordinary library products, and need no such promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels import Batch, RouteRules, cpu
from moesaic.kernels.native import NativeKernels


class InvariantKernels:
    """What needs no gradient goes straight to the native kernels."""

    def __init__(self, native: NativeKernels) -> None:
        self.native, self.library = native, native.library
        self.rotate, self.rms_norm, self.heads, self.gated = native.rotate, native.rms_norm, native.heads, native.gated

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        if not _learning(x_TI, weight_OI, bias_O):
            return self.native.linear(x_TI, weight_OI, bias_O)
        out_TO: Tensor = _Linear.apply(self.native, x_TI, weight_OI, bias_O)
        return out_TO

    def attention(
        self,
        q_THC: Tensor,
        k_MNC: Tensor,
        v_MNX: Tensor,
        scale: float,
        window: int | None = None,
        keep_TM: Tensor | None = None,
    ) -> Tensor:
        def run(kernels: Any, q_THC: Tensor, k_MNC: Tensor, v_MNX: Tensor) -> Tensor:
            # The native kernel takes packed heads only, and leaves others to the library.
            packed = q_THC.contiguous(), k_MNC.contiguous(), v_MNX.contiguous()
            out_THX: Tensor = kernels.attention(*packed, scale, window, keep_TM)
            return out_THX

        return self._twice(run, q_THC, k_MNC, v_MNX)

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
        def run(kernels: Any, q_THC: Tensor, k_TNC: Tensor, v_TNC: Tensor) -> Tensor:
            out_THC: Tensor = kernels.attend(q_THC, k_TNC, v_TNC, layout, slabs, scale, window)
            return out_THC

        return self._twice(run, q_THC, k_TNC, v_TNC)

    def route(
        self, logits_TE: Tensor, correction_E: Tensor | None, rules: RouteRules, chosen_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            routes_TK, weights_TK = self.native.route(logits_TE, correction_E, rules, chosen_TK)
        if not _learning(logits_TE):
            return routes_TK, weights_TK

        def run(kernels: Any, logits_TE: Tensor) -> Tensor:
            weights_TK: Tensor = kernels.route(logits_TE, correction_E, rules, routes_TK)[1]
            return weights_TK

        return routes_TK, self._twice(run, logits_TE)

    def experts(
        self,
        x_TD: Tensor,
        routes_TK: Tensor,
        weights_TK: Tensor,
        gate_up_EGD: Tensor,
        down_EDF: Tensor,
        activation: str,
    ) -> Tensor:
        def run(kernels: Any, x_TD: Tensor, weights_TK: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor) -> Tensor:
            out_TD: Tensor = kernels.experts(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF, activation)
            return out_TD

        return self._twice(run, x_TD, weights_TK, gate_up_EGD, down_EDF)

    def _twice(self, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Forward by the native kernels; for the gradient by the library once more, whose gradient is known."""
        if not _learning(*inputs):
            return run(self.native, *inputs)
        out: Tensor = _Twice.apply(run, self.native, *inputs)
        return out


def _learning(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: NativeKernels, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.biased = bias_O is not None
        return native.linear(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d_out_TO,) = grads
        x_TI, weight_OI = ctx.saved_tensors
        d_x_TI = d_out_TO @ weight_OI if ctx.needs_input_grad[1] else None
        d_weight_OI = d_out_TO.T @ x_TI if ctx.needs_input_grad[2] else None
        return None, d_x_TI, d_weight_OI, d_out_TO.sum(0) if ctx.biased else None


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], native: NativeKernels, *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(native, *inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach() for tensor in ctx.saved_tensors]
        wanted = list(ctx.needs_input_grad[2:])
        for tensor, needed in zip(inputs, wanted):
            tensor.requires_grad_(needed)
        with torch.enable_grad():
            out = ctx.run(cpu, *inputs)
        found = iter(torch.autograd.grad(out, [t for t, needed in zip(inputs, wanted) if needed], grads[0]))
        return None, None, *(next(found) if needed else None for needed in wanted)
