"""Products of quantized matrices by every instruction set that this processor has: the bits of the plain C loops."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from moesaic.kernels.native import SIGNATURES, build
from moesaic.kernels.quantized import BITS, QuantizedMatrix

# What each is compiled with, and what the processor must say it has. The first has none of the instructions.
X86 = {
    "plain": ("-march=x86-64", set()),
    "avx2": ("-march=haswell", {"avx2", "fma"}),
    "avx2 vnni": ("-march=haswell -mavxvnni", {"avx2", "fma", "avx_vnni"}),
    "avx512": ("-march=skylake-avx512", {"avx512bw", "avx512vl"}),
    "avx512 vnni": ("-march=cascadelake", {"avx512bw", "avx512vl", "avx512_vnni"}),
}
ARM = {"plain": ("-march=armv8-a", set()), "dotprod": ("-march=armv8.2-a+dotprod", {"asimddp"})}
TARGETS = {"x86_64": X86, "aarch64": ARM}.get(platform.machine(), {})
# Inputs, outputs, group, zeros: matrices that end within a block, a tile, a group; groups longer than what is unpacked
# at a time.
SHAPES = [
    (576, 100, 64, False),
    (1536, 33, 128, True),
    (48, 7, 32, True),
    (1120, 40, 1120, True),
    (640, 36, 2048, False),
]


def there(needs: set[str]) -> bool:
    text = Path("/proc/cpuinfo").read_text()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return bool(lines) and needs <= set(lines[0].split())


def compiled(flags: str, to: Path) -> ctypes.CDLL:
    """Not optimised: whole numbers come out the same, and it takes a quarter of the time."""
    compiler = build.compiler()
    assert compiler is not None
    command = [compiler, "-std=gnu11", "-O0", "-fPIC", "-shared", *flags.split()]
    subprocess.run(
        [*command, str(build.SOURCES / "quantized.c"), "-lm", "-o", str(to)], check=True, capture_output=True
    )
    library = ctypes.CDLL(str(to))
    library.quantized_linear.argtypes, library.quantized_linear.restype = SIGNATURES["quantized_linear"], None
    return library


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> dict[str, ctypes.CDLL]:
    if build.compiler() is None or not TARGETS:
        pytest.skip("no C compiler, or one way only")
    folder = tmp_path_factory.mktemp("targets")
    here = {name: flags for name, (flags, needs) in TARGETS.items() if there(needs)}
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda item: compiled(item[1], folder / f"{item[0].replace(' ', '-')}.so"), here.items())
        return dict(zip(here, made, strict=True))


def product(library: ctypes.CDLL, x_TI: torch.Tensor, weight: QuantizedMatrix) -> torch.Tensor:
    y_TO = torch.full((len(x_TI), weight.shape[0]), float("nan"))
    zeros = weight.zeros_XGO
    library.quantized_linear(
        x_TI.data_ptr(), weight.tiles_XB.data_ptr(), weight.scales_XGO.data_ptr(),
        None if zeros is None else zeros.data_ptr(), None, y_TO.data_ptr(), *x_TI.shape, weight.shape[0],
        x_TI.stride(0), weight.bits, weight.group, 1 if weight.activation_bits == 8 else 2, 1,
    )  # fmt: skip
    return y_TO


@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("bits", BITS)
def test_every_instruction_set_gives_the_same_bits(libraries, bits: int, activation_bits: int) -> None:
    torch.manual_seed(bits)
    for inputs, outputs, group, zeros in SHAPES:
        codes_OI = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
        codes_OI[0], groups = 2**bits - 1, -(-inputs // group)  # the largest sums there can be
        zeros_OG = torch.rand(outputs, groups) * 2**bits if zeros else None
        weight = QuantizedMatrix.of(codes_OI, torch.rand(outputs, groups), zeros_OG, bits, group, activation_bits)
        x_TI = torch.randn(9, inputs) * torch.logspace(-2, 2, inputs)
        x_TI[0], x_TI[1], x_TI[2] = 1.0, -1.0, 0.0
        wanted_TO = product(libraries["plain"], x_TI, weight)
        for name, library in libraries.items():
            for rows in (1, 2, 3, 4, 9):  # each number of rows that has a way of its own
                assert torch.equal(product(library, x_TI[:rows], weight), wanted_TO[:rows]), (name, inputs, rows)
