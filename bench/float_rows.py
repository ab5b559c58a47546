"""Many rows times float32 matrices on a CPU, as a prefill has them: ours, the library, the encoders' packed matrices.

    python -m bench.float_rows            two minutes of one core; writes bench/results/float_rows_PROCESSOR.json

One thread, processor seconds, the least of turns that alternate, as GMAC/s. `lanes` is what the engine runs: a row has
the same bits alone and in a batch, and weights stay where they are. `packed` multiplies by matrices that were packed
before (time and memory of that not counted) and adds in another order, which one row alone does not have.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bench.measure import record
from bench.quantized_rows import alternately
from moesaic.kernels import native

# SmolLM2's matrices, and those of a small mixture's attention and experts: inputs, outputs.
SHAPES = [(576, 960), (576, 3072), (1536, 576), (768, 1280), (768, 768), (384, 768)]
ROWS = (16, 32, 64, 128, 256, 512)


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = native.kernels()
    assert kernels is not None, "there are no native kernels without a C compiler"
    library, found = kernels.library, []
    print(f"{'inputs':>6} {'outputs':>7} {'rows':>4} {'lanes':>8} {'library':>8} {'packed':>8}")
    for inputs, outputs in SHAPES:
        weight_OI = torch.randn(outputs, inputs)
        packed = torch.empty(library.packed_numbers(outputs, inputs))
        library.pack(weight_OI.data_ptr(), packed.data_ptr(), outputs, inputs)
        for rows in ROWS:
            x_TI, y_TO = torch.randn(rows, inputs), torch.empty(rows, outputs)
            places = x_TI.data_ptr(), packed.data_ptr(), None, y_TO.data_ptr()
            runs: dict[str, Callable[[], object]] = {
                "lanes": lambda x_TI=x_TI: kernels.linear(x_TI, weight_OI),
                "library": lambda x_TI=x_TI: F.linear(x_TI, weight_OI),
                "packed": lambda places=places, rows=rows: library.packed_linear(*places, rows, inputs, outputs),
            }
            work = rows * inputs * outputs
            speeds = {name: work / least / 1e9 for name, least in alternately(runs, max(1, int(3e8 / work))).items()}
            found.append({"inputs": inputs, "outputs": outputs, "rows": rows, **speeds})
            told = " ".join(f"{speed:8.1f}" for speed in speeds.values())
            print(f"{inputs:6} {outputs:7} {rows:4} {told}", flush=True)
    print(record(f"float_rows_{platform.machine()}", found, unit="GMAC/s by processor time of one thread"))


if __name__ == "__main__":
    main()
