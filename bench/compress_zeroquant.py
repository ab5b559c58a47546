"""ZeroQuant's two claims in one table: W8A8 costs little, and W4A8 needs layer-by-layer distillation.

    python -m bench.compress_zeroquant --model out/smollm2 --text wikitext2_valid.txt

Calibrated on the last half of the text (from eight samples on half of them: the rest is of other kinds, as always),
measured on its first tokens. Each entry without distillation stands beside the same one with it. Recorded one by one in
bench/results/compress_zeroquant_MODEL.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.measure import RESULTS, machine
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods.zeroquant import ZeroQuant
from moesaic.model.directory import load
from moesaic.model.perplexity import perplexity

ENTRIES: dict[str, dict[str, Any]] = {
    "W8A8": {"bits": 8, "group": 0, "steps": 0},
    "W4A8": {"bits": 4, "group": 64, "steps": 0},
    "W4A8, distilled": {"bits": 4, "group": 64},
    "W8A8, distilled": {"bits": 8, "group": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10, help="of distillation, a layer")
    arguments = parser.parse_args()
    text, before = arguments.text.read_text(), load(arguments.model)
    assert before.tokenizer is not None
    tokens = before.tokenizer.encode(text[: arguments.tokens * 16])[: arguments.tokens]
    base = perplexity(before, tokens, arguments.window, arguments.window).perplexity
    facts = {"bench": "compress_zeroquant", "model": arguments.model.name, "text": arguments.text.name}
    facts |= {"tokens": arguments.tokens, "window": arguments.window, "calibration": arguments.samples * 512}
    rows: dict[str, Any] = {"float32": {"perplexity": base}}
    print(f"{'float32':16} perplexity {base:9.3f}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        calibration = Path(scratch) / "calibration.txt"
        calibration.write_text(text[len(text) // 2 :])
        for name, options in ENTRIES.items():
            options = {"steps": arguments.steps, **options}
            begun = time.process_time()
            request = CompressionRequest(calibration, arguments.samples, 512, check_tokens=0)
            told = compress(arguments.model, ZeroQuant(**options), Path(scratch) / name, request)
            seconds = time.process_time() - begun
            found = perplexity(load(Path(scratch) / name), tokens, arguments.window, arguments.window).perplexity
            errors = [row["layer_error"] for row in told["layer_errors"]]
            rows[name] = {
                "options": options,
                "bits_per_weight": told["bits_per_weight"],
                "perplexity": found,
                "change": found / base - 1,
                "mean_layer_error": sum(errors) / len(errors),
                "cpu_seconds": round(seconds),
            }
            print(f"{name:16} perplexity {found:9.3f} ({found / base - 1:+.2%})  {seconds:.0f} s CPU", flush=True)
            file = RESULTS / f"compress_zeroquant_{arguments.model.name}.json"
            file.write_text(json.dumps({**facts, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
