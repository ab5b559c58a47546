"""Many rows times quantized matrices on a CPU, beside float32 and the library's product of 8-bit integers.

    python -m bench.quantized_rows            a minute of one core; writes bench/results/quantized_rows_PROCESSOR.json

One thread, processor seconds, the least of turns that alternate. Ours rounds the rows, multiplies and scales; the
library's `torch._int_mm` takes integers and returns integers, so it is a bound, not something that could stand in.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import torch

from bench.measure import record
from moesaic.kernels import native
from moesaic.kernels.quantized import QuantizedKernels, QuantizedMatrix

SHAPES = [(576, 1536), (2048, 2048)]
ROWS = (8, 32, 128, 512)
FORMS = {"W8A8": (8, 8, None), "W4A8": (4, 8, 64), "W8A16": (8, 16, 64), "W4A16": (4, 16, 64)}
TURNS = 7


def alternately(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least processor seconds of each."""
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(TURNS):
        for name, run in runs.items():
            start = time.process_time()
            for _ in range(repeats):
                run()
            least[name] = min(least[name], (time.process_time() - start) / repeats)
    return least


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compiled = native.kernels()
    assert compiled is not None, "there are no native kernels without a C compiler"
    kernels, found = QuantizedKernels(compiled), []
    print(f"{'inputs':>6} {'outputs':>7} {'rows':>4}  " + "".join(f"{name:>18}" for name in [*FORMS, "int8 library"]))
    for inputs, outputs in SHAPES:
        matrices = {}
        for name, (bits, activations, group) in FORMS.items():
            group = group or inputs
            codes_OI = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
            scales_OG = torch.rand(outputs, inputs // group)
            matrices[name] = QuantizedMatrix.of(codes_OI, scales_OG, None, bits, group, activations)
        weight_OI = torch.randn(outputs, inputs)
        whole_IO = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8).T
        for rows in ROWS:
            x_TI = torch.randn(rows, inputs)
            whole_TI = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
            runs: dict[str, Callable[[], object]] = {"float32": lambda: x_TI @ weight_OI.T}
            runs |= {name: lambda m=matrix: kernels.linear(x_TI, m) for name, matrix in matrices.items()}
            if rows > 16:  # the library's least
                runs["int8 library"] = lambda: torch._int_mm(whole_TI, whole_IO)
            seconds = alternately(runs, max(1, 512 // rows))
            rates = {name: rows * inputs * outputs / spent / 1e9 for name, spent in seconds.items()}
            found.append({"inputs": inputs, "outputs": outputs, "rows": rows, "gmac_per_second": rates})
            cells = [
                f"{rates[n]:.0f} ({rates[n] / rates['float32']:.2f}x)" if n in rates else ""
                for n in [*FORMS, "int8 library"]
            ]
            print(f"{inputs:6} {outputs:7} {rows:4}  " + "".join(f"{cell:>18}" for cell in cells), flush=True)
    print("GMAC/s, and how many times float32 in brackets")
    record(f"quantized_rows_{platform.machine()}", found)


if __name__ == "__main__":
    main()
