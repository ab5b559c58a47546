"""What an expert makes of gate and up: SwiGLU, or gpt-oss's gate, whose two halves are held within bounds.

Both halves are rounded as the matmul gives them, then a bias is added, in float32: so on every path, and so a token's
bits do not depend on which.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from moesaic.kernels.reference import CLAMPED

KNOWN = ("silu", CLAMPED)  # activations


@dataclass(frozen=True)
class Gate:
    clamped: bool = False
    bias_EG: torch.Tensor | None = None

    @classmethod
    def of(cls, activation: str, bias_EG: torch.Tensor | None) -> "Gate":
        assert activation in KNOWN, activation
        return cls(activation == CLAMPED, None if bias_EG is None else bias_EG.contiguous())

    @property
    def is_plain(self) -> bool:
        return not self.clamped and self.bias_EG is None


PLAIN = Gate()


# The bounds (7) and the slope (1.702) are those of `reference.clamped_swiglu`.
@triton.jit
def hidden_of(gate, up, IS_CLAMPED: tl.constexpr):
    if IS_CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        hidden = gate / (1.0 + tl.exp(gate * -1.702)) * (up + 1.0)
    else:
        hidden = gate / (1.0 + tl.exp(-gate)) * up
    return hidden


@triton.jit
def gradients_of(grad, gate, up, IS_CLAMPED: tl.constexpr):
    """Of gate and up, from that of hidden; beyond a bound there is none."""
    if IS_CLAMPED:
        below, between = gate <= 7.0, tl.abs(up) <= 7.0
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(gate * -1.702))
        silu = gate * sigmoid
        grad_gate = tl.where(below, grad * up * (sigmoid + silu * (1.0 - sigmoid) * 1.702), 0.0)
        grad_up = tl.where(between, grad * silu, 0.0)
    else:
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        grad_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
        grad_up = grad * silu
    return grad_gate, grad_up
