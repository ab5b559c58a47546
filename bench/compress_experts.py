"""Fewer experts: how many questions a mixture still answers when some are left out, or merged, beside all of them.

    python -m bench.compress_experts --model out/quickstart/aligned

Calibrated on questions of the training split, asked held-out ones, greedy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.measure import RESULTS, machine
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.data.tasks.families import PRESETS
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites.tasks import Tasks
from moesaic.kernels import hardware
from moesaic.methods import Method, build
from moesaic.quickstart.life import conversations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--family", choices=list(PRESETS), default="sums")
    parser.add_argument("--keep", type=int, nargs="*", default=[7, 6, 4])
    parser.add_argument("--questions", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(hardware.threads())
    suite = Tasks(arguments.family, arguments.questions, 32)
    rows: dict[str, Any] = {}

    def ask(name: str, place: Path) -> None:
        found = suite.run(moesaic.load(place), SuiteContext())
        rows[name] = {key: found[key] for key in ("accuracy", "accuracy_low", "accuracy_high")}
        rows[name]["bytes"] = sum(file.stat().st_size for file in place.glob("*.safetensors"))
        print(
            f"{name:20} {found['accuracy']:.1%} ({found['accuracy_low']:.0%} to {found['accuracy_high']:.0%})",
            flush=True,
        )

    ask("all", arguments.model)
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "questions.txt"
        text.write_text(conversations(arguments.model, arguments.family), encoding="utf-8")
        for keep in arguments.keep:
            for name in ("prune_experts", "merge_experts"):
                made = build(Method(name, {"keep": keep}), Compressor, "bench")  # type: ignore[type-abstract]
                out = Path(scratch) / f"{name}-{keep}"
                compress(arguments.model, made, out, CompressionRequest(text, 64, 128, check_tokens=0, mix=False))
                ask(f"{name} {keep}", out)
    told = {"bench": "compress_experts", "family": arguments.family, "questions": arguments.questions}
    (RESULTS / "compress_experts.json").write_text(
        json.dumps({**told, "machine": machine(), "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
