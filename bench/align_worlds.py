"""A tiny policy learns a game of cards by playing it (GRPO on the world's own reward): held-out tasks won at the start
and at the end.

    python -m bench.align_worlds                ten minutes of a core
    python -m bench.align_worlds --seeds 0      five

The start is made from nothing: SFT on the episodes of a solver, from which it learns to read and to play, then on those
of a careless one, from which it learns a habit that loses (bench/worlds_policy.py). The other world that a policy of
this size learns in is bench/know_rl.py's, whose pieces these are. Intervals are Wilson's, at 95 %; a draw is half a
win. Runs and rows are kept in out/align_worlds; a bench that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import moesaic
from bench.know_rl import Bench, Sizes, asked, together, told, variants
from bench.measure import record
from bench.worlds_policy import demonstrations, empty_model, text_of, trained, world_of, write
from moesaic import atomic

WORLD, CARELESS = "cards", 0.8  # of its turns
# A hand of cards is one token, and what the world says between two numbers a few: episodes are short.
PIECES = r"\d(?:, \d)*|[^\d]+"


def start_model(folder: Path, steps: int) -> tuple[Path, float]:
    """Can play, and seldom does. The seconds that SFT took."""
    files = {"right": folder / "right.jsonl", "careless": folder / "careless.jsonl"}
    if not files["careless"].exists():
        for file, share in zip(files.values(), (0.0, CARELESS), strict=True):
            shown = demonstrations(WORLD, 4_000, int(1000 * share), share)
            write(file, ({"messages": line["messages"]} for line in shown))
    lines = [json.loads(line) for file in files.values() for line in file.read_text().splitlines()]
    base = empty_model(text_of(lines), folder, 0, vocabulary=1024, pieces=PIECES)
    stage = {"name": "sft", "batch_tokens": 2048}
    right = stage | {"steps": steps, "data": [{"path": str(files["right"])}]}
    careless = stage | {"steps": steps // 5, "data": [{"path": str(files["careless"])}]}  # habits are learned sooner
    seconds = trained([right], base, folder / "right", lr=0.01)
    return folder / "start", seconds + trained([careless], folder / "right", folder / "start", lr=0.004, decay=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO, 128 episodes each")
    parser.add_argument("--worlds", type=int, default=200, help="held-out tasks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of GRPO; the start is one")
    parser.add_argument("--out", type=Path, default=Path("out/align_worlds"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    world, folder = world_of(WORLD), arguments.out / WORLD
    rates = {"sft": 0.0, "pair": 0.0, "critic": 0.0, "policy": 0.002}
    sizes = Sizes(0, 8, 0, 0, arguments.steps, 16, 8, rates, "adamw")
    start, seconds = start_model(folder, arguments.sft_steps)
    file = folder / "start.row.json"
    if not file.exists():
        found = asked(start, None, world, arguments.worlds, sizes, "cpu")
        atomic.write_json(file, {"asked": found, "cpu_seconds": seconds})
    rows: list[dict[str, Any]] = [{"row": "start"} | json.loads(file.read_text())]
    told("start", rows[0])
    own = []
    for seed in arguments.seeds:
        place = folder / f"seed-{seed}"
        stages = variants(sizes, {"name": WORLD}, place, seed)
        bench = Bench(start, place, stages, sizes, world, arguments.worlds, "cpu")
        own.append({"row": "grpo", "seed": seed} | bench.row("grpo_outcome"))
    rows += [*own, {"row": "grpo", "seeds": arguments.seeds, "asked": together(own, arguments.worlds)}]
    if not arguments.no_record:
        parameters = sum(parameter.numel() for parameter in moesaic.load(start).parameters())
        facts = {"world": WORLD, "worlds": arguments.worlds, "parameters": parameters, "careless": CARELESS}
        record("align_worlds", rows, **facts)


if __name__ == "__main__":
    main()
