"""What calibration text does to GPTQ: perplexity in domain and out of it, for one kind of text and for several.

    python -m bench.compress_calibration --model out/smollm2 --text wikitext2_valid.txt --other gsm8k_train.jsonl

Calibrated on the last half of the text (and, where mixed, on the builtin reference and what the model itself writes);
measured on the text's first tokens (in domain), on the other file, and on Python's source code, which is never
calibrated on (out of domain). Plain rounding, which reads nothing, stands beside. Entries are recorded one by one in
bench/results/compress_calibration_MODEL.json, and a run with the same sizes adds to those that are there.
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
from moesaic.compress.calibration import unlike_text
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.compress.methods.gptq import GPTQ
from moesaic.compress.methods.rtn import RoundToNearest
from moesaic.model.directory import load
from moesaic.model.perplexity import perplexity

LENGTH = 512
# Samples (None: as many as it takes) and whether they are of several kinds.
ENTRIES: dict[str, tuple[type[Compressor], int | None, bool]] = {
    "RTN": (RoundToNearest, 1, False),
    "GPTQ, the default": (GPTQ, None, True),
    "GPTQ, 4 samples of the text": (GPTQ, 4, False),
    "GPTQ, 16 samples of the text": (GPTQ, 16, False),
    "GPTQ, 16 samples of several kinds": (GPTQ, 16, True),
}


def measured(directory: Path, texts: dict[str, list[int]], window: int) -> dict[str, float]:
    model = load(directory)
    return {name: perplexity(model, tokens, window, window).perplexity for name, tokens in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="calibrated on, and measured on as in domain")
    parser.add_argument("--other", type=Path, required=True, help="measured on only")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text, that are measured on")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=list(ENTRIES), default=list(ENTRIES))
    arguments = parser.parse_args()
    text, tokenizer = arguments.text.read_text(), load(arguments.model).tokenizer
    assert tokenizer is not None
    sources = {"in domain": text, arguments.other.name: arguments.other.read_text(), "source code": unlike_text()}
    texts = {name: tokenizer.encode(own[: arguments.tokens * 16])[: arguments.tokens] for name, own in sources.items()}
    facts = {"bench": "compress_calibration", "model": arguments.model.name, "text": arguments.text.name}
    facts |= {"tokens": arguments.tokens, "window": arguments.window, "bits": arguments.bits, "length": LENGTH}
    file = RESULTS / f"compress_calibration_{arguments.model.name}.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    rows: dict[str, Any] = known.get("rows", {}) if all(known.get(key) == value for key, value in facts.items()) else {}
    if "float32" not in rows:
        rows["float32"] = {"perplexity": measured(arguments.model, texts, arguments.window)}
    base = rows["float32"]["perplexity"]
    print(f"{'float32':36}" + "".join(f"{name} {found:.3f}  " for name, found in base.items()), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        calibration = Path(scratch) / "calibration.txt"
        calibration.write_text(text[len(text) // 2 :])
        for name in arguments.only:
            kind, samples, mix = ENTRIES[name]
            method = kind(bits=arguments.bits, group=64, symmetric=False)  # type: ignore[call-arg]
            begun, out = time.process_time(), Path(scratch) / "made"
            request = CompressionRequest(calibration, samples, LENGTH, check_tokens=0, mix=mix, force=True)
            told = compress(arguments.model, method, out, request)
            seconds = time.process_time() - begun
            found = measured(out, texts, arguments.window)
            change = {where: found[where] / base[where] - 1 for where in found}
            rows[name] = {
                "calibration_tokens": told["calibration_tokens"],
                "bits_per_weight": told["bits_per_weight"],
                "perplexity": found,
                "change": change,
                "cpu_seconds": round(seconds),
            }
            told_all = "".join(f"{where} {found[where]:.3f} ({change[where]:+.2%})  " for where in found)
            print(f"{name:36}{told_all}{told['calibration_tokens']} tokens, {seconds:.0f} s CPU", flush=True)
            RESULTS.mkdir(exist_ok=True)
            file.write_text(json.dumps({**facts, "machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
