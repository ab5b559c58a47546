"""Writing token by token with weights of four bits on a CPU, beside our own float32 and the library's four-bit product.

    python -m bench.compress_speed            about four minutes; writes bench/results/compress_speed.json

Models: the 238M-parameter mixture of `bench.forward` (89M active; random weights) and SmolLM2. One sequence, greedy, 64
tokens known. Memory is what the weights take in the process. The last rows time one product of one row with a matrix of
SmolLM2's shapes: ours (activations of 15 bits), `torch.ops.aten._dyn_quant_matmul_4bit` (of 8 bits), and float32.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.decode_cpu import PROMPT, own_steps
from bench.forward import batch, pair
from bench.measure import machine, record, side_by_side
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.kernels import hardware, native
from moesaic.kernels.grid import Grid
from moesaic.kernels.quantized import QuantizedKernels
from moesaic.methods import Method, build
from moesaic.model.directory import convert, load, open_source, save
from moesaic.model.transformer import Model

SHAPES = [(576, 960), (576, 3072), (1536, 576), (2048, 8192)]


def weight_bytes(model: Model) -> int:
    return sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])


def models(work: Path) -> dict[str, Path]:
    found = {"qwen3_moe 238M": work / "mixture", "SmolLM2 135M": work / "smollm2"}
    _, mixture = pair("qwen3_moe 238M")
    save(mixture, found["qwen3_moe 238M"])
    convert(open_source("smollm2"), found["SmolLM2 135M"], life=[], dtype=torch.float32)
    return found


def products() -> list[dict[str, Any]]:
    """The library's product packs symmetric codes of groups along with scales and bias."""
    compiled = native.kernels()
    assert compiled is not None
    kernels, rows = QuantizedKernels(compiled), []
    for inputs, outputs in SHAPES:
        weight_OI, x_1I = torch.randn(outputs, inputs), torch.randn(1, inputs)
        made = Grid(4, 64).matrix(weight_OI)
        codes = (weight_OI / made.scales_GO.T.repeat_interleave(64, 1)).round().clamp(-8, 7).int() + 8
        packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
            (codes[:, 1::2] << 4 | codes[:, ::2]).to(torch.uint8),
            made.scales_GO.T.contiguous().to(torch.bfloat16), None, 64, inputs, outputs,
        )  # fmt: skip
        with torch.inference_mode():
            runs = {
                "ours": lambda x=x_1I, m=made: kernels.linear(x, m),
                "library": lambda x=x_1I, p=packed, i=inputs, o=outputs: torch.ops.aten._dyn_quant_matmul_4bit(
                    x, p, 64, i, o
                ),
                "float32": lambda x=x_1I, w=weight_OI: compiled.linear(x, w),
            }
            exact = x_1I @ weight_OI.T
            errors = {name: float((run() - exact).norm() / exact.norm()) for name, run in runs.items()}
            ideal = x_1I @ made.dense().T
            own = float((runs["ours"]() - ideal).norm() / ideal.norm())
            theirs = float((runs["library"]() - ideal).norm() / ideal.norm())
            times = side_by_side(runs, 1.0)
        rows.append(
            {"inputs": inputs, "outputs": outputs, "microseconds": {n: t * 1e6 for n, t in times.items()}}
            | {"error_to_float": errors, "error_to_codes": {"ours": own, "library": theirs}}
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=hardware.threads())
    parser.add_argument("--no-record", action="store_true", help="print only")
    parser.add_argument("--work", type=Path, help="where models go, and stay")
    parser.add_argument("--prepare", action="store_true", help="only make the models")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.work or Path(scratch)
        paths = {"qwen3_moe 238M": work / "mixture", "SmolLM2 135M": work / "smollm2"}
        if not all(path.is_dir() for path in paths.values()):
            paths = models(work)
        for path in paths.values():
            if not path.with_name(f"{path.name}-4").is_dir():
                method = build(Method("rtn", {"bits": 4, "group": 64}), Compressor, "bench")  # type: ignore[type-abstract]
                compress(
                    path,
                    method,
                    path.with_name(f"{path.name}-4"),
                    CompressionRequest(samples=16, check_tokens=0, mix=False),
                )
        if arguments.prepare:
            return
        rows: list[dict[str, Any]] = []
        for name, path in paths.items():
            plain = load(path, threads=arguments.threads)
            small = load(path.with_name(f"{path.name}-4"), threads=arguments.threads)
            prompts = batch([PROMPT], plain.config.vocab)
            times: dict[str, list[float]] = {"float32": [], "4 bits": []}
            for model in (plain, small):
                own_steps(model, prompts, 2)
            for _ in range(arguments.rounds):
                for kind, model in (("float32", plain), ("4 bits", small)):
                    times[kind].append(own_steps(model, prompts, arguments.steps)[0])
            full, few = (min(taken) for taken in times.values())  # the least disturbed of each
            memory = weight_bytes(small) / weight_bytes(plain)
            rows.append(
                {"model": name, "float32_ms": full * 1e3, "4bit_ms": few * 1e3, "ratio": full / few}
                | {"float32_bytes": weight_bytes(plain), "4bit_bytes": weight_bytes(small), "memory": memory}
            )
            print(
                f"{name}: float32 {full * 1e3:.2f} ms a token, 4 bits {few * 1e3:.2f} ms: {full / few:.2f}x; "
                f"{memory:.3f} of the memory",
                flush=True,
            )
            del plain, small
        rows += products()
        print(machine())
        if not arguments.no_record:
            print(record("compress_speed", rows))


if __name__ == "__main__":
    main()
