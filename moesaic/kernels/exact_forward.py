"""Forward by kernels that promise bits and know no gradient, backward through others that mean the same and have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[..., Any]  # tensors in, a tensor or a tuple of them out


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether a gradient is wanted through any of these."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def exact_forward(exact: Run, plain: Run, *inputs: Tensor) -> Any:
    """What `exact` gives; for its gradient, `plain` is run once more on the way back."""
    return _ExactForward.apply(exact, plain, *inputs) if needs_grad(*inputs) else exact(*inputs)


def exact_matmul(exact: Run, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x W^T + bias as `exact` gives it; its gradients are matmuls that need nothing again, of the weight's kind."""
    if not needs_grad(x_TI, weight_OI, bias_O):
        plain_TO: Tensor = exact(x_TI, weight_OI, bias_O)
        return plain_TO
    out_TO: Tensor = _ExactMatmul.apply(exact, x_TI, weight_OI, bias_O)
    return out_TO


class _ExactMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Run, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Any:
        ctx.save_for_backward(x_TI, weight_OI)
        ctx.biased = bias_O is not None
        return exact(x_TI, weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        d_out_TO = grads[0].to(weight_OI.dtype)
        d_x_TI = d_out_TO @ weight_OI if ctx.needs_input_grad[1] else None
        d_weight_OI = d_out_TO.T @ x_TI if ctx.needs_input_grad[2] else None
        return None, d_x_TI, d_weight_OI, d_out_TO.sum(0) if ctx.biased else None


class _ExactForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exact: Run, plain: Run, *inputs: Tensor) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        return exact(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach() for tensor in ctx.saved_tensors]
        wanted = list(ctx.needs_input_grad[2:])
        for tensor, needed in zip(inputs, wanted):
            tensor.requires_grad_(needed)
        with torch.enable_grad():
            out = ctx.plain(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        found = iter(torch.autograd.grad(outs, [t for t, needed in zip(inputs, wanted) if needed], grads))
        return None, None, *(next(found) if needed else None for needed in wanted)
