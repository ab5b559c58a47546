"""FP8, MXFP4 and NVFP4 directories made here and loaded by transformers on a GPU: do both give the same logits?

    python bench/gpu_formats.py                    about 2 minutes on an H200
    python bench/gpu_formats.py --tiny             the same on a CPU with smaller models, recorded nowhere

Needs the package compressed-tensors (pure Python; it wants pydantic and loguru), which transformers reads these
formats with; without it only DeepSeek's FP8 layout is tried. Random models of two families, dense and of experts, are
rounded to every format; both sides then compute the same 64 tokens from the directory. `apart` is the relative distance
of their logits, `of_float` that of ours from the model before rounding, `greedy` the share of places with the same
likeliest token. 4-bit formats are decompressed to bfloat16 by the package, so that they are compared as far as that
goes. Goal: below 0.01 in 8 bits and 0.03 in 4 on everything transformers has a place for; what it refuses is written
down with its own words. Of experts it has none for NVFP4's global scales, and (5.22) none for more than one block of
FP8 in a matrix. Rows go to bench/results/gpu_formats.json as they come.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.measure import record
from moesaic.compress import compress as compressing
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.methods import Method, build
from moesaic.model.directory import load
from moesaic.model.formats.float_matrix import FLOAT_FORMATS
from tests.compress.made import make

SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


def sizes_of(kind: str, tiny: bool) -> dict[str, Any]:
    """Whole blocks of 128, which DeepSeek's layout is made of."""
    sizes: dict[str, Any] = dict(TINY if tiny else SIZES)
    if kind == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 128} if tiny else EXPERTS
    return sizes


def theirs(path: Path, dtype: torch.dtype, device: torch.device, dequantize: bool) -> torch.nn.Module:
    options = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)} if dequantize else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
    return model.eval().to(device)


def distance(given: torch.Tensor, wanted: torch.Tensor) -> float:
    return round(((given - wanted).norm() / wanted.norm()).item(), 6)


def compared(path: Path, form: str, layout: str | None, device: torch.device, place: Path) -> dict[str, Any]:
    out = place / f"{path.name}-{form}-{layout}"
    method = build(Method("rtn", {"format": form}), Compressor, "bench")  # type: ignore[type-abstract]
    compress(path, method, out, CompressionRequest(samples=2, length=64, check_tokens=0, layout=layout))
    four = FLOAT_FORMATS[form].bits == 4
    dtype = torch.bfloat16 if four else torch.float32
    plain, own = load(path, dtype=torch.float32, device=device), load(out, dtype=dtype, device=device)
    tokens = torch.randint(plain.config.vocab, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    ours = own.logits([tokens])[0].float()
    row = {"of_float": distance(ours, plain.logits([tokens])[0].float())}
    row["mebibytes"] = round(sum(file.stat().st_size for file in out.glob("*.safetensors")) / 2**20, 2)
    begun = time.perf_counter()
    model = theirs(out, dtype, device, layout == "fp8")
    row["loaded_seconds"] = round(time.perf_counter() - begun, 2)
    with torch.no_grad():
        found = model(torch.tensor([tokens], device=device)).logits[0].float()
    row["apart"] = distance(found, ours)
    row["greedy"] = round((found.argmax(-1) == ours.argmax(-1)).float().mean().item(), 4)
    row["met"] = row["apart"] < (0.03 if four else 0.01)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    if device.type == "cuda":  # float32 is what both sides are compared in
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    compressing.plot_errors = lambda result, file: None  # nobody looks at it, and its package may be missing
    package = importlib.util.find_spec("compressed_tensors") is not None
    print(
        f"transformers {transformers.__version__}, compressed-tensors {'there' if package else 'missing'}", flush=True
    )
    cells: list[tuple[str, str, str | None]] = [("qwen3_moe", "fp8_block", "fp8")]
    if package:
        cells += [(kind, form, None) for kind in ("llama", "qwen3_moe") for form in FLOAT_FORMATS]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for kind in {kind for kind, _, _ in cells}:
            make(place / kind, kind, **sizes_of(kind, options.tiny))
        for kind, form, layout in cells:
            row: dict[str, Any] = {"family": kind, "format": form, "layout": layout or "compressed-tensors"}
            try:
                row |= compared(place / kind, form, layout, device, place)
            except Exception as error:
                row |= {"refused": f"{type(error).__name__}: {error}"[:400]}
            rows.append(row)
            print(row, flush=True)
            if not options.tiny:
                record("gpu_formats", rows, transformers=transformers.__version__, compressed_tensors=package)
    print(f"{sum(bool(row.get('met')) for row in rows)} of {len(rows)} agree", flush=True)


if __name__ == "__main__":
    main()
