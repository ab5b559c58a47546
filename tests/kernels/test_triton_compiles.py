"""The Hopper kernels cannot run without a Hopper GPU, but they can be compiled for one.

In a process of its own, because it replaces Triton's driver.
    pytest tests/kernels/test_triton_compiles.py
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

if os.environ.get("PRETEND_HOPPER") != "1":

    def test_for_hopper():
        environment = {**os.environ, "PRETEND_HOPPER": "1", "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-4000:]

else:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from moesaic.kernels.triton import hopper
    from moesaic.kernels.triton.routing import Routing

    T, D, F, E, K, P = 256, 512, 384, 4, 2, 1024

    class Pretended:
        """A driver for a Hopper GPU that is not there; enough of one to compile."""

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    @pytest.fixture
    def compiled(monkeypatch, tmp_path):
        """What the launches of a test compiled to."""
        kernels = []
        kernel = hopper.grouped_product

        class Compiler:
            def __getitem__(self, grid):
                return lambda *inputs, **options: kernels.append(kernel.warmup(*inputs, grid=grid, **options))

        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        monkeypatch.setattr(hopper, "grouped_product", Compiler())
        monkeypatch.setattr(hopper, "processors", lambda device: 132)
        triton.runtime.driver.set_active(Pretended())
        return kernels

    def routing():
        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int32)

        return Routing(numbers(T * K), numbers(P), numbers(8, 8), numbers(8, 8), numbers(E, 8), numbers(2), 128)

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    def test_products(compiled):
        hopper.gate_up(empty(T, D), empty(E, 2 * F, D), routing(), save=True, choices=K)
        hopper.grad_gate_up(
            empty(T, D), empty(E, D, F), empty(P, 2 * F), torch.zeros(T, K), routing(), True, gathered=True
        )
        hopper.columns(empty(P, 2 * F), empty(T, D), routing(), gather_b=True, choices=K)
        assert len(compiled) == 3
        for kernel in compiled:
            assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.bulk.tensor" in kernel.asm["ptx"]
            assert "setmaxnreg" in kernel.asm["ptx"], "warps are not specialised"
            assert "ld.local" not in kernel.asm["ptx"]
            assert kernel.metadata.shared <= 227 * 1024
