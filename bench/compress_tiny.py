"""Compression on a small trained model: calibration on one kind of text or several, plans, targets, columns.

    python -m bench.tiny_language_model --texts wikitext2_valid.txt gsm8k_train.jsonl --out out/tiny
    python -m bench.compress_tiny --model out/tiny --texts wikitext2_valid.txt gsm8k_train.jsonl

Perplexity on held-out text of every kind. `code` is never calibrated on, and `wikitext2` is what `--data` gives where a
row says so. All of it takes some minutes of CPU time; the model has 0.4 million parameters, so the numbers compare
methods and say nothing of large models. It is far from its capacity, so only two bits cost it anything.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.measure import RESULTS, machine
from bench.tiny_language_model import held_out, learned, texts_of
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.methods import Method, build
from moesaic.model.directory import load
from moesaic.model.perplexity import perplexity

LENGTH, TOKENS = 128, 2048
TWO: dict[str, Any] = {"bits": 2, "group": 32, "symmetric": False}
# name: method, options, --data is wikitext2, further wishes
ENTRIES: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    "rtn2": ("rtn", TWO, False, {}),
    "hqq2": ("hqq", {"bits": 2, "group": 32}, False, {}),
    "awq2, wikitext and others": ("awq", TWO, True, {"samples": 16}),
    "gptq2, 4 samples of wikitext": ("gptq", TWO, True, {"samples": 4, "mix": False}),
    "gptq2, 16 samples, half of them wikitext": ("gptq", TWO, True, {"samples": 16}),
    "gptq2, 16 samples of wikitext": ("gptq", TWO, True, {"samples": 16, "mix": False}),
    "gptq2, by convergence": ("gptq", TWO, True, {}),
    "gptq2, builtin text alone": ("gptq", TWO, False, {"samples": 16, "mix": False}),
    "mixed 2.5, second order, rtn": ("mixed", {"bits": 2.5, "group": 32, "rounding": "rtn"}, True, {"samples": 16}),
    "mixed 2.5, first order, rtn": (
        "mixed", {"bits": 2.5, "group": 32, "rounding": "rtn", "order": "first"}, True, {"samples": 16},
    ),
    "mixed 2.5, second order, gptq": ("mixed", {"bits": 2.5, "group": 32}, True, {"samples": 16}),
    "mixed 2.5, largest weights not clipped, rtn": (
        "mixed", {"bits": 2.5, "group": 32, "rounding": "rtn", "thresholds": False}, True, {"samples": 16},
    ),
    "target avx512_vnni, 5 bits": (
        "mixed", {"bits": 5.0, "group": 32, "target": "avx512_vnni", "rounding": "rtn"}, True, {"samples": 16},
    ),
    "target avx512_vnni, 5 bits, speed 2.2": (
        "mixed", {"bits": 5.0, "group": 32, "target": "avx512_vnni", "rounding": "rtn", "speed": 2.2}, True,
        {"samples": 16},
    ),
    "iss 50 %, lasso": ("iss", {"keep": 0.5, "score": "lasso"}, True, {"samples": 16}),
    "iss 50 %, leverage": ("iss", {"keep": 0.5, "score": "leverage"}, True, {"samples": 16}),
    "iss 50 %, magnitude": ("iss", {"keep": 0.5, "score": "magnitude"}, True, {"samples": 16}),
    "iss 50 %, random": ("iss", {"keep": 0.5, "score": "random"}, True, {"samples": 16}),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--only", nargs="*", default=list(ENTRIES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    texts = texts_of(arguments.texts)
    plain = load(arguments.model, threads=1)
    assert plain.tokenizer is not None
    encode = plain.tokenizer.encode
    tokens = {kind: encode(held_out(text)[: TOKENS * 8])[:TOKENS] for kind, text in texts.items()}

    def measured(place: Path) -> dict[str, float]:
        model = load(place, threads=1)
        return {kind: perplexity(model, some, LENGTH, LENGTH).perplexity for kind, some in tokens.items()}

    file = RESULTS / "compress_tiny.json"
    rows: dict[str, Any] = json.loads(file.read_text())["rows"] if file.is_file() else {}
    base = rows["float32"] = {"perplexity": measured(arguments.model)}
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "wikitext.txt"
        data.write_text(learned(texts[arguments.texts[0].stem.partition("_")[0]]))
        for number, name in enumerate(arguments.only):
            method, options, given, wishes = ENTRIES[name]
            made = build(Method(method, options), Compressor, "bench")  # type: ignore[type-abstract]
            began, out = time.process_time(), Path(scratch) / str(number)
            request = CompressionRequest(data if given else None, length=LENGTH, check_tokens=0, **wishes)
            told = compress(arguments.model, made, out, request)
            seconds, found = time.process_time() - began, measured(out)
            changes = [math.log(found[kind] / base["perplexity"][kind]) for kind in found]
            rows[name] = {
                "method": method,
                "options": options,
                "calibration_tokens": told["calibration_tokens"],
                "bits_per_weight": told["bits_per_weight"],
                "perplexity": found,
                "change": math.exp(sum(changes) / len(changes)) - 1,  # geometric mean over kinds
                "plan": told.get("plan"),
                "cpu_seconds": seconds,
            }
            shown = "  ".join(f"{kind} {found[kind]:.2f}" for kind in found)
            print(f"{name:44} {told['bits_per_weight']:6.2f} bits  {rows[name]['change']:+8.2%}  {shown}", flush=True)
            facts = {"bench": "compress_tiny", "tokens": TOKENS, "machine": machine(), "rows": rows}
            file.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
