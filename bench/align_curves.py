"""Held-out accuracy of a tiny mixture before and after learning by trying, over seeds: GRPO alone, and with DAPO's
pieces; what invariant mode shows of trainer and engine on the way.

    python -m bench.align_curves                      three seeds, the whole life of each: some minutes a seed
    python -m bench.align_curves --seeds 0 --variants dapo

Each seed is pretrained (recipes/tiny.yaml), taught by examples, then aligned (recipes/align-tiny.yaml) by every variant
from the same examples-taught model. Runs are kept in out/align_curves; a bench that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench.measure import record
from moesaic.align.align import align
from moesaic.recipe import load_recipe
from moesaic.train.pretrain import pretrain

OUT = Path("out/align_curves")
VARIANTS = {
    # As GRPO was first written: every answer counts the same, and the ratio is clipped alike on both sides.
    "grpo": ["align.stages.0.level=sequence", "align.stages.0.objective={clip_high: 0.2}"],
    "dapo": ["align.stages.0.level=token", "align.stages.0.objective={clip_high: 0.28}", "align.stages.0.dynamic=2"],
}


def only(stage: int, seed: int, overrides: list[str]) -> Any:
    """The recipe with one of its stages."""
    recipe = load_recipe("recipes/align-tiny.yaml")
    kept = recipe.dump()["align"]["stages"][stage] | {"seed": seed}
    return load_recipe("recipes/align-tiny.yaml", [f"align.stages={json.dumps([kept])}", *overrides])


def curve(folder: Path, key: str) -> list[tuple[int, float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], round(row[key], 4)) for row in rows if key in row]


def timed(folder: Path, run: Any) -> float:
    """Seconds of a run that is not there yet; those it took, if it is."""
    done = folder.with_suffix(".seconds")
    if not done.exists():
        start = time.perf_counter()
        run()
        done.write_text(str(time.perf_counter() - start))
    return float(done.read_text())


def life(seed: int, variants: list[str]) -> list[dict[str, Any]]:
    base, taught = OUT / f"{seed}-base", OUT / f"{seed}-taught"
    tiny = load_recipe("recipes/tiny.yaml", [f"train.seed={seed}"])
    seconds = {"pretrain": timed(base, lambda: pretrain(tiny, base, quiet=True))}
    seconds["sft"] = timed(taught, lambda: align(only(0, seed, []), base, taught, quiet=True))
    before = curve(taught, "accuracy")[-1][1]
    rows = []
    for name in variants:
        folder = OUT / f"{seed}-{name}"
        took = timed(folder, lambda: align(only(1, seed, VARIANTS[name]), taught, folder, quiet=True))
        accuracy = curve(folder, "accuracy")
        row = {
            "seed": seed,
            "variant": name,
            "before": before,
            "after": accuracy[-1][1],
            "accuracy": accuracy,
            "reward": curve(folder, "reward")[::5],
            "answer_tokens": curve(folder, "answer_tokens")[::5],
            "mismatch_max": max(value for _, value in curve(folder, "mismatch_max")),
            "routers_differ": max(value for _, value in curve(folder, "routers_differ")),
            "seconds": {key: round(value) for key, value in (seconds | {"policy": took}).items()},
        }
        print(
            f"seed {seed} {name:5} held-out accuracy {before:.3f} to {row['after']:.3f} in {took:.0f} s"
            f"   max |Δlogp| {row['mismatch_max']:g}, routers that differ {row['routers_differ']:g}",
            flush=True,
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    rows = [row for seed in arguments.seeds for row in life(seed, arguments.variants)]
    if not arguments.no_record:
        record("align_curves", rows)


if __name__ == "__main__":
    main()
