"""The Hopper kernels cannot run without a Hopper GPU, but they can be compiled for one.

In a process of its own, because it replaces Triton's driver. Triton keeps what it has compiled, under a hash of the
source, the target and its own version: what has not changed since the last time is not compiled again.
    pytest tests/kernels/test_triton_compiles.py
"""

import os
import re
import subprocess
from dataclasses import replace

import pytest

from tests.kernels import interpreter

pytest.importorskip("triton")

if os.environ.get("PRETEND_HOPPER") != "1":

    def test_for_hopper():
        interpreter.run_tests(__file__, PRETEND_HOPPER="1", TRITON_INTERPRET="0")

else:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from moesaic.kernels.grid import Grid
    from moesaic.kernels.interface import QKNorm, RopeAngles, Routes
    from moesaic.kernels.layer_weights import NormWeights
    from moesaic.kernels.triton import compile_ahead, few_rows, gated, gemv
    from moesaic.kernels.triton.attention import (
        choose,
        chosen_prompts,
        expanded,
        index_rows,
        latent,
        latent_hopper,
        paged,
        qk_norm_rope_cache,
    )
    from moesaic.kernels.triton.attention.paged_rows import Rows
    from moesaic.kernels.triton.experts import biases, decode, streamed
    from moesaic.kernels.triton.experts.gate import PLAIN
    from moesaic.kernels.triton.experts.hopper import decode as hopper_decode
    from moesaic.kernels.triton.experts.hopper import grouped as hopper
    from moesaic.kernels.triton.experts.sort import Routing
    from moesaic.kernels.triton.float8.hopper import matmul as float8
    from moesaic.kernels.triton.float8.rounding import Rounded
    from moesaic.kernels.triton.quantized import decode as quantized_decode
    from moesaic.kernels.triton.quantized import matmul as quantized_matmul
    from moesaic.kernels.triton.quantized.hopper import matmul as quantized_rows
    from moesaic.kernels.triton.quantized.hopper import sums
    from moesaic.kernels.triton.quantized.weight import GpuQuantizedWeight

    T, D, F, E, K, P = 256, 512, 384, 4, 2, 1024

    class Pretended:
        """A driver for a Hopper GPU that is not there; enough of one to compile."""

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    class Compiler:
        """In place of a kernel: a launch compiles it, and `kernels` has what it compiled to."""

        def __init__(self, kernel, kernels):
            self.kernel, self.kernels = kernel, kernels

        def __getitem__(self, grid):
            return lambda *inputs, **options: self.kernels.append(self.kernel.warmup(*inputs, grid=grid, **options))

    @pytest.fixture
    def compiled(monkeypatch):
        """What the launches of a test compiled to."""
        kernels = []
        monkeypatch.setattr(hopper, "grouped_matmul", Compiler(hopper.grouped_matmul, kernels))
        monkeypatch.setattr(hopper, "processors", lambda device: 132)
        triton.runtime.driver.set_active(Pretended())
        return kernels

    def routing():
        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int32)

        return Routing(numbers(T * K), numbers(P), numbers(8, 8), numbers(8, 8), numbers(E, 8), numbers(2), 128)

    def empty(*shape):
        return torch.empty(shape, dtype=torch.bfloat16)

    @pytest.mark.parametrize(("D", "F"), [(512, 384), (320, 2880)], ids=["whole tiles", "cut tiles"])
    def test_grouped_matmuls(compiled, D, F):
        hopper.gate_up(empty(T, D), empty(E, 2 * F, D), routing(), save=True, choices=K)
        hopper.grad_gate_up(
            empty(T, D), empty(E, D, F), empty(P, 2 * F), torch.zeros(T, K), routing(), True, gathered=True
        )
        if D % 128:
            hopper.columns(empty(P, D), empty(P, F), routing())
        else:
            hopper.columns(empty(P, 2 * F), empty(T, D), routing(), gather_b=True, choices=K)
        assert len(compiled) == 3
        for kernel in compiled:
            assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.bulk.tensor" in kernel.asm["ptx"]
            assert "setmaxnreg" in kernel.asm["ptx"], "warps are not specialised"
            assert "ld.local" not in kernel.asm["ptx"]
            assert kernel.metadata.shared <= 227 * 1024

    @pytest.mark.parametrize("tile", [float8.Tile(), float8.Tile(256, 128), float8.Tile(128, 128, 6)], ids=str)
    def test_float8_matmuls(monkeypatch, tmp_path, tile):
        """Sums of two parts, and the sum that is being made, have registers without spilling any."""
        kernels = []
        monkeypatch.setattr(float8, "float8_matmul", Compiler(float8.float8_matmul, kernels))
        monkeypatch.setattr(float8, "processors", lambda device: 132)
        triton.runtime.driver.set_active(Pretended())
        x8, up, down = (empty(*shape).to(torch.float8_e4m3fn) for shape in ((P, D), (E, 2 * F, D), (E, D, F)))
        given, weight = Rounded(x8, torch.empty(4, P)), Rounded(up, torch.empty(E, 6, 4))
        sorted_rows = replace(routing(), align=tile.rows // 2)
        float8.matmul(given, weight, None, sorted_rows, tile)
        if tile == float8.Tile():
            float8.matmul(given, Rounded(up[:1], weight.scales[:1]), empty(2 * F))
            for save in (True, False):
                _, hidden = float8.gate_up(given, weight, sorted_rows, save)
            float8.matmul(hidden, Rounded(down, torch.empty(E, 4, 3)), None, sorted_rows)
        for kernel in kernels:
            ptx = kernel.asm["ptx"]
            assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx and "setmaxnreg" in ptx
            assert spilled(kernel, tmp_path) == 0 and kernel.metadata.shared <= 227 * 1024

    def spilled(kernel, directory):
        """Bytes of registers that a kernel keeps in memory, as its binary says."""
        binary = directory / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
        return int(re.search(r"STACK:(\d+)", usage)[1])

    @pytest.fixture
    def launched(monkeypatch):
        """What the launches of serving compiled to."""
        kernels = []

        def launch(kernel, grid, *inputs, PDL, **options):
            if "PACKED" in options:
                options["PACKED"] = True  # as for tensors that are on a GPU
            kernels.append(kernel.warmup(*inputs, grid=grid, PDL=True, launch_pdl=True, **options))

        for module in (
            quantized_decode,
            quantized_matmul,
            biases,
            decode,
            hopper_decode,
            latent,
            gemv,
            few_rows,
            gated,
            paged,
            choose,
            latent_hopper,
            index_rows,
            streamed,
        ):
            monkeypatch.setattr(module, "launch_pdl", launch)
        monkeypatch.setattr(few_rows, "processors", lambda device: 132)
        triton.runtime.driver.set_active(Pretended())
        return kernels

    ROUTES, WEIGHTS = torch.zeros(1, K, dtype=torch.int64), torch.ones(1, K)

    def quantized_matmuls(grid):
        """Experts of one token, and linear maps of one token and of many."""

        def quantized(count, outputs, inputs):
            made = [grid.matrix(torch.randn(outputs, inputs)) for _ in range(count)]
            return GpuQuantizedWeight(made, torch.bfloat16, stacked=count > 1)

        quantized_matmul.unsorted_experts(
            empty(1, D), Routes(ROUTES, WEIGHTS), quantized(E, 2 * F, D), quantized(E, D, F)
        )
        for tokens in (1, 32, 128):
            quantized_matmul.linear(empty(tokens, D), quantized(1, D, D))

    def test_experts_of_few_tokens(launched):
        """The weights are the first operand: of 64 rows the tensor cores read them where they were copied to."""
        decode.decode(
            empty(1, D), ROUTES, WEIGHTS, empty(E, 2 * F, D), empty(E, D, F), (32, 128, 4, 4), (32, 128, 4, 4)
        )
        streamed.rows(empty(T, D), empty(E, 2 * F, D), routing(), (32, 128, 3, 4), K, pair=PLAIN)
        streamed.rows(empty(P, F), empty(E, D, F), routing(), (64, 64, 5, 4))
        assert len(launched) == 4
        for kernel in launched:
            ptx = kernel.asm["ptx"]
            assert "wgmma.mma_async" in ptx and "cp.async.cg" in ptx and "ld.local" not in ptx
            assert "griddepcontrol.wait" in ptx

    @pytest.mark.parametrize("width", [768, 1408, 960])
    def test_weights_are_read_before_the_wait(launched, width):
        """Whether all of them fit into the ring of stages or not."""
        routes, weights = torch.zeros(1, 8, dtype=torch.int64), torch.ones(1, 8)
        assert hopper_decode.takes(2048, width, 8, torch.bfloat16)
        hopper_decode.output(empty(8, width), routes, weights, empty(2, 2048, width), empty(1, 2048))
        (kernel,) = launched
        ptx = kernel.asm["ptx"]
        assert "wgmma.mma_async" in ptx and "ld.local" not in ptx
        assert 0 < ptx.index("cp.async.cg") < ptx.index("griddepcontrol.wait")
        assert kernel.metadata.shared <= 113 * 1024, "two programs on a processor"

    @pytest.mark.parametrize(
        ("rows", "inputs", "outputs", "programs"), [(1, 4096, 14336, 7), (8, 16384, 5120, 3), (3, 2880, 4096, 1)]
    )
    def test_few_rows_take_their_share_of_a_processor(launched, rows, inputs, outputs, programs):
        few_rows.few_rows(empty(rows, inputs), empty(outputs, inputs), empty(outputs), empty(rows, outputs))
        gated.gated(empty(rows, outputs))
        kernel, _ = launched
        ptx = kernel.asm["ptx"]
        assert "mma.sync" in ptx and "ld.local" not in ptx
        assert 0 < ptx.index("cp.async.cg") < ptx.index("griddepcontrol.wait") < ptx.rindex("cp.async.cg")
        assert 227 * 1024 // (programs + 1) < kernel.metadata.shared + 1024 <= 227 * 1024 // programs

    def test_products_of_biases_are_rounded_before_they_are_added(launched):
        biases.weighed_biases(torch.zeros(3, K, dtype=torch.int32), torch.ones(3, K), empty(E, D))
        (kernel,) = launched
        assert "fma" not in kernel.asm["ptx"] and "griddepcontrol.wait" in kernel.asm["ptx"]

    def test_kernels_compile_in_threads_and_are_not_launched(monkeypatch):
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        triton.runtime.driver.set_active(Pretended())
        found = compile_ahead.compile_launches(lambda: gated.gated(empty(3, 2 * F)), torch.device("cpu"))
        assert found == 1 and not compile_ahead.only_compiling()

    @pytest.mark.parametrize(("inputs", "outputs"), [(2048, 5120), (4096, 2048), (1536, 100)])
    def test_one_row_meets_weights_that_were_asked_for(launched, inputs, outputs):
        gemv.gemv(empty(1, inputs), empty(outputs, inputs), empty(outputs), empty(1, outputs))
        (kernel,) = launched
        ptx = kernel.asm["ptx"]
        assert "mma.sync" in ptx and "ld.local" not in ptx
        assert 0 < ptx.rindex("cp.async.cg") < ptx.index("griddepcontrol.wait")
        assert kernel.metadata.shared <= 227 * 1024

    @pytest.mark.parametrize(
        "grid", [Grid(8, 0, True), Grid(4, 128, True), Grid(4, 128, False)], ids=["8", "4-symmetric", "4-with-zeros"]
    )
    def test_codes_meet_inputs_in_their_order(launched, grid):
        quantized_matmuls(grid)
        assert len(launched) == 5
        for kernel in launched:
            ptx = kernel.asm["ptx"]
            assert "sub.bf16x2" in ptx and "wgmma.mma_async" in ptx and "kWidth = 4" not in kernel.asm["ttgir"]
            assert "ld.local" not in ptx

    @pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (8, False)], ids=["4-symmetric", "8-with-zeros"])
    def test_codes_of_many_rows_go_to_registers(monkeypatch, bits, symmetric):
        """16 bytes a thread, and from there to the tensor cores as their first operand."""
        kernels = []
        for module in (quantized_rows, sums):
            monkeypatch.setattr(
                module, "launch", lambda kernel, grid, *a, **options: Compiler(kernel, kernels)[grid](*a, **options)
            )
        monkeypatch.setattr(quantized_rows, "processors", lambda device: 132)
        triton.runtime.driver.set_active(Pretended())
        matrices = [Grid(bits, 128, symmetric).matrix(torch.randn(2 * F, D)) for _ in range(E)]
        several = GpuQuantizedWeight(matrices, torch.bfloat16, stacked=True)
        one = GpuQuantizedWeight(matrices[:1], torch.bfloat16, stacked=False)
        quantized_rows.matmul(empty(P, D), several, None, routing(), pair=True)
        quantized_rows.matmul(empty(T, D), one, empty(2 * F))
        many = [kernel.asm["ptx"] for kernel in kernels if "wgmma.mma_async" in kernel.asm["ptx"]]
        assert len(many) == 2 and len(kernels) == (2 if symmetric else 4)
        for ptx in many:
            assert "ld.shared.v4.b32" in ptx and "sub.bf16x2" in ptx and "setmaxnreg" in ptx
            assert "ld.local" not in ptx and "st.local" not in ptx
            operands = re.findall(r"wgmma.mma_async\S+ \{[^}]*\}, *(\S)", ptx)
            assert operands and set(operands) == {"{"}, "the first operand is read from shared memory"
        assert all(kernel.metadata.shared <= 227 * 1024 for kernel in kernels)

    @pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "with-zeros"])
    @pytest.mark.parametrize(("width", "choices"), [(768, 8), (640, 6)], ids=str)
    @pytest.mark.parametrize("bits", [4, 8])
    def test_codes_go_to_registers(launched, bits, symmetric, width, choices):
        """As many as fit are asked for together, and where the launch waits for its inputs, before that."""
        matrices = [Grid(bits, 64, symmetric).matrix(torch.randn(size)) for size in ((2 * width, 2048), (2048, width))]
        gate_up, down = (GpuQuantizedWeight([matrix], torch.bfloat16, stacked=True) for matrix in matrices)
        routes = Routes(torch.zeros(1, choices, dtype=torch.int64), torch.ones(1, choices))
        quantized_decode.experts(empty(1, 2048), routes, gate_up, down)
        quantized_decode.linear(empty(3, 2048), gate_up, empty(2 * width), empty(3, 2 * width))
        for kernel in launched:
            ptx = kernel.asm["ptx"]
            assert "mma.sync" in ptx and "ld.local" not in ptx and "st.local" not in ptx
        hidden, output, plain = (kernel.asm["ptx"] for kernel in launched)
        assert hidden.index("mma.sync") > [at.start() for at in re.finditer("ld.global.v4.b32", hidden)][2 * 8 - 1]
        for ptx, blocks in ((output, width // 128), (plain, 16)):
            before, after = ptx.split("griddepcontrol.wait")
            asked = blocks * bits // 4
            assert before.count("ld.global.v4.b32") >= min(16, asked)
            assert after.count("ld.global.v4.b32") == max(0, asked - 16)

    @pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "float8"])
    @pytest.mark.parametrize("heads", [20, 128])
    def test_latent_attention(launched, monkeypatch, heads, cached):
        """At the sizes of published models: all six compile, and what they read fits into shared memory."""
        monkeypatch.setattr(paged, "prefill_kernel", Compiler(paged.prefill_kernel, launched))
        tokens, rank, rope_size, plain = 4, 512, 64, 128
        one = torch.zeros(tokens, dtype=torch.int32)
        pairs, table = torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 8, dtype=torch.int32)
        most = paged.latent_tile(heads, False)[1]
        rows = Rows(one, one, table, 256, decode_X2=pairs, prefill_X2=pairs, prefill_tokens=most)
        latents, up = empty(32, 16, rank + rope_size).to(cached), empty(heads, 2 * plain, rank)
        rope = RopeAngles(torch.empty(256, rope_size // 2), torch.empty(256, rope_size // 2), interleaved=True)
        q_THX = latent.queries_into_cache(
            empty(tokens, heads, plain + rope_size), empty(tokens, rank + rope_size), up[:, :plain],
            NormWeights(empty(rank), 1e-6), rope, one, rows, latents,
        )  # fmt: skip
        out = paged.attend(q_THX, latents, latents, rows, 0.1, rope_size=rope_size)
        latent.matmul_by_head(out, up[:, plain:], empty(tokens, heads, plain))
        assert len(launched) == 6
        for kernel in launched:
            assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024

    def test_attention_to_expanded_latents(launched, monkeypatch):
        monkeypatch.setattr(expanded, "expanded_kernel", Compiler(expanded.expanded_kernel, launched))
        tokens, heads, one = 256, 128, torch.zeros(256, dtype=torch.int32)
        tiles, key = torch.zeros(2, 4, dtype=torch.int32), empty(tokens, 64)
        expanded.attend_expanded(
            empty(tokens, heads, 192), empty(tokens, heads, 576), empty(tokens, heads * 256), key, one, tiles,
            empty(tokens, heads, 128), 0.1,
        )  # fmt: skip
        (kernel,) = launched
        assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.cg" in kernel.asm["ptx"]
        assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024

    @pytest.mark.parametrize(("heads", "length"), [(64, 32768), (32, 32768), (64, 40000)])
    def test_an_indexer_chooses(launched, heads, length):
        """Rows of 32,768 scores are counted where they are: in registers; of longer ones the rest is read again."""
        one, pairs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
        rows = Rows(one, one, torch.zeros(4, 8, dtype=torch.int32), length, pairs, index_X2=pairs)
        keys, norm = empty(32, 16, 128), NormWeights(empty(128), 1e-6, empty(128))
        rope = RopeAngles(torch.empty(256, 32), torch.empty(256, 32))
        q_THC = index_rows.index_rows(empty(4, heads * 128), empty(4, 128), norm, rope, one, rows, keys)
        choose.choose(q_THC, empty(4, heads), keys, rows, 2048)
        rotated, scored, chosen = launched
        assert "wgmma.mma_async" in scored.asm["ptx"] and "cp.async.cg" in scored.asm["ptx"]
        for kernel in launched:
            assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024

    @pytest.mark.parametrize("heads", [128, 16])
    def test_attention_to_what_was_chosen(launched, monkeypatch, heads):
        monkeypatch.setattr(latent_hopper, "is_hopper", lambda device: True)
        for module, name in ((chosen_prompts, "hopper_kernel"), (chosen_prompts, "chosen_kernel")):
            monkeypatch.setattr(module, name, Compiler(getattr(module, name), launched))
        one, pairs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
        rows = Rows(one, one, torch.zeros(4, 8, dtype=torch.int32), 32768, pairs, kinds_T=one, choosing=True)
        q, latents, chosen = empty(4, heads, 576), empty(32, 16, 576), torch.zeros(4, 2048, dtype=torch.int32)
        out = paged.attend(q, latents, latents, rows, 0.1, rope_size=64, chosen_TK=chosen)
        chosen_prompts.attend_chosen(q, latents, chosen, rows, 0.1, 64, out)
        assert len(launched) == 3
        assert ("wgmma.mma_async" in launched[0].asm["ptx"]) == (heads == 128)
        for kernel in launched:
            assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024

    def test_attention_to_latents_by_two_warpgroups(launched, monkeypatch):
        """To all of a sequence: few rows in splits, many by programs that walk them."""
        monkeypatch.setattr(latent_hopper, "is_hopper", lambda device: True)
        monkeypatch.setattr(latent_hopper, "processors", lambda device: 132)
        monkeypatch.setattr(latent_hopper, "whole_kernel", Compiler(latent_hopper.whole_kernel, launched))
        one, pairs = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
        rows = Rows(
            one, one, torch.zeros(4, 8, dtype=torch.int32), 32768, pairs, prefill_X2=pairs.clone(), prefill_tokens=1
        )
        q, latents = empty(4, 128, 576), empty(32, 16, 576)
        paged.attend(q, latents, latents, rows, 0.1, rope_size=64)
        split, join, whole = launched
        for kernel in (split, whole):
            assert "wgmma.mma_async" in kernel.asm["ptx"] and "cp.async.cg" in kernel.asm["ptx"]
        for kernel in launched:
            assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024

    def test_attention_to_keys_of_eight_bits(launched, monkeypatch):
        monkeypatch.setattr(paged, "prefill_kernel", Compiler(paged.prefill_kernel, launched))
        monkeypatch.setattr(qk_norm_rope_cache, "launch_pdl", paged.launch_pdl)
        one = torch.zeros(4, dtype=torch.int32)
        pairs, table = torch.zeros(4, 2, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
        rows = Rows(one, one, table, 256, decode_X2=pairs, prefill_X2=pairs, prefill_tokens=8)
        cache = {name: empty(32, 16, 4, 128).to(torch.float8_e4m3fn) for name in ("keys", "values")}
        rope, norm = RopeAngles(torch.empty(256, 64), torch.empty(256, 64)), QKNorm(empty(128), empty(128), 1e-6)
        q_THC = qk_norm_rope_cache.qk_norm_rope_into_cache(empty(4, 40 * 128), norm, rope, one, rows, cache, 32, 4)
        paged.attend(q_THC, cache["keys"], cache["values"], rows, 0.1)
        assert len(launched) == 4
        assert "cvt.rn.satfinite.e4m3x2" in launched[0].asm["ptx"]
        for kernel in launched:
            assert "ld.local" not in kernel.asm["ptx"] and kernel.metadata.shared <= 227 * 1024
