"""What fewer bits cost: perplexity against size for every method, beside float32 and beside plain rounding.

    python -m bench.compress --model out/smollm2 --text wikitext2_valid.txt            all entries; an hour on two cores
    python -m bench.compress --model out/smollm2 --text wikitext2_valid.txt --only rtn4 gptq4

Calibrated on pieces of the last half of the text, measured on its first tokens. SmolLM2 comes from a Q4_1 file: its
weights lie on a grid of 4 bits in groups of 32 already, so no entry uses that grid; groups of 32 here have 3 bits.
Entries are recorded one by one in bench/results/compress_MODEL.json, so a run can be split.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.measure import RESULTS, machine
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.kernels import hardware
from moesaic.methods import Method, build
from moesaic.model import lineage
from moesaic.model.directory import load
from moesaic.model.perplexity import perplexity

ENTRIES: dict[str, tuple[str, dict[str, Any]]] = {
    "rtn8": ("rtn", {"bits": 8, "group": 64}),
    "rtn8_channel": ("rtn", {"bits": 8, "group": 0}),
    "gptq8": ("gptq", {"bits": 8, "group": 64, "symmetric": True}),
    "w8a8": ("zeroquant", {"bits": 8, "group": 0, "steps": 0}),
    "w4a8": ("zeroquant", {"bits": 4, "group": 64, "steps": 20}),
    "rtn4": ("rtn", {"bits": 4, "group": 64}),
    "rtn4_128": ("rtn", {"bits": 4, "group": 128}),
    "hqq4": ("hqq", {"bits": 4, "group": 64}),
    "awq4": ("awq", {"bits": 4, "group": 64}),
    "gptq4_symmetric": ("gptq", {"bits": 4, "group": 64, "symmetric": True}),
    "gptq4_32_symmetric": ("gptq", {"bits": 4, "group": 32, "symmetric": True}),
    "gptq4": ("gptq", {"bits": 4, "group": 64, "symmetric": False}),
    "gptq4_alone": ("gptq", {"bits": 4, "group": 64, "symmetric": False, "damping": 0.01, "turns": 0}),
    "milo4": ("milo", {"bits": 4, "group": 96, "rank": 64}),
    "gptq4_128": ("gptq", {"bits": 4, "group": 128, "symmetric": False}),
    "gptq5": ("gptq", {"bits": 5, "group": 64, "symmetric": False}),
    "mixed4": ("mixed", {"bits": 4.0}),
    "mixed4.5": ("mixed", {"bits": 4.5}),
    "rtn3": ("rtn", {"bits": 3, "group": 64, "symmetric": False}),
    "rtn3_32": ("rtn", {"bits": 3, "group": 32, "symmetric": False}),
    "hqq3": ("hqq", {"bits": 3, "group": 64}),
    "awq3": ("awq", {"bits": 3, "group": 64, "symmetric": False}),
    "gptq3": ("gptq", {"bits": 3, "group": 64, "symmetric": False}),
    "gptq3_32": ("gptq", {"bits": 3, "group": 32, "symmetric": False}),
    "milo3_data_free": ("milo", {"bits": 3, "group": 64, "rank": 32, "calibrate": False}),
    "milo3": ("milo", {"bits": 3, "group": 96, "rank": 64}),
    "gptq2": ("gptq", {"bits": 2, "group": 64, "symmetric": False}),
    "milo2": ("milo", {"bits": 2, "group": 64, "rank": 32}),
    "mixed3": ("mixed", {"bits": 3.0}),
    "nm24_wanda": ("nm", {"score": "wanda"}),
    "nm24_magnitude": ("nm", {"score": "magnitude"}),
    "nm24_admm": ("nm", {"score": "admm"}),
    "nm24_admm4": ("nm", {"score": "admm", "bits": 4}),
    "students": ("students", {"depth": 0.75, "steps": 200}),
    "xtc2": ("xtc", {"bits": 2, "depth": 1.0, "steps": 60}),
}


def measured(directory: Path, tokens: list[int], window: int) -> tuple[float, float]:
    model = load(directory)
    begun = time.perf_counter()
    return perplexity(model, tokens, window, window).perplexity, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--only", nargs="*", choices=list(ENTRIES), default=list(ENTRIES))
    parser.add_argument(
        "--work",
        type=Path,
        help="where compressed models go, and stay: those made in the same way before are not made again",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    file = RESULTS / f"compress_{arguments.model.name}.json"
    facts = {"bench": "compress", "model": arguments.model.name, "text": arguments.text.name}
    facts |= {"tokens": arguments.tokens, "window": arguments.window, "calibration": arguments.samples * 512}
    known = json.loads(file.read_text()) if file.is_file() else {}
    rows: dict[str, Any] = known.get("rows", {}) if all(known.get(key) == value for key, value in facts.items()) else {}
    text = arguments.text.read_text()
    tokenizer = load(arguments.model).tokenizer
    assert tokenizer is not None
    tokens = tokenizer.encode(text[: arguments.tokens * 16])[: arguments.tokens]
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        calibration = work / "calibration.txt"
        calibration.write_text(text[len(text) // 2 :])
        if "float32" not in rows:
            found, seconds = measured(arguments.model, tokens, arguments.window)
            size = (arguments.model / "model.safetensors").stat().st_size
            rows["float32"] = {"perplexity": found, "bytes": size, "tokens_per_second": len(tokens) / seconds}
        base = rows["float32"]
        for name in arguments.only:
            method, options = ENTRIES[name]
            made = build(Method(method, options), Compressor, "bench")  # type: ignore[type-abstract]
            wish = CompressionRequest(calibration, arguments.samples, 512, check_tokens=0, force=True, mix=False)
            told = lineage.read(work / name)[-1] if (work / name / lineage.FILE).is_file() else {}
            wanted = {"name": method, **asdict(made)}  # type: ignore[call-overload]
            read = arguments.samples * 512 if made.reads_text else 0
            if (told.get("method"), told.get("calibration_tokens")) != (wanted, read):
                told = compress(arguments.model, made, work / name, wish)
            found, seconds = measured(work / name, tokens, arguments.window)
            rows[name] = {
                "method": method,
                "options": options,
                "bytes": told["bytes"],
                "bits_per_weight": told["bits_per_weight"],
                "perplexity": found,
                "change": found / base["perplexity"] - 1,
                "seconds": told["seconds"],
                "tokens_per_second": len(tokens) / seconds,
            }
            print(
                f"{name:16} {told['bits_per_weight']:6.3f} bits  {told['bytes'] / base['bytes']:.3f} of the bytes  "
                f"perplexity {found:9.3f} ({found / base['perplexity'] - 1:+.2%})  {told['seconds']:.0f} s",
                flush=True,
            )
            RESULTS.mkdir(exist_ok=True)
            file.write_text(json.dumps({**facts, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
