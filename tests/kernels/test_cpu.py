"""The library's operations on a CPU, where they differ from what is plainly written."""

import pytest
import torch

from moesaic.kernels import choose, cpu


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 400.0])  # the square of the second is more than float16 can hold
def test_norm_that_is_learned_in_half_precision(kind, size):
    torch.manual_seed(0)
    x_TD, weight_D, d_out_TD = (
        (torch.randn(8, 64) * size).to(kind),
        torch.rand(64).to(kind),
        torch.randn(8, 64).to(kind),
    )

    def run(norm, kind):
        x, weight = (tensor.to(kind, copy=True).requires_grad_() for tensor in (x_TD, weight_D))
        out = norm(x, weight, 1e-6)
        out.backward(d_out_TD.to(kind))
        return out.detach(), x.grad, weight.grad

    wanted = run(choose("cpu", "reference").rms_norm, torch.float32)
    for kernels in (cpu, choose("cpu")):
        for ours, exact in zip(run(kernels.rms_norm, kind), wanted, strict=True):
            assert (ours.float() - exact).norm() < 0.5 * torch.finfo(kind).eps * exact.norm()
