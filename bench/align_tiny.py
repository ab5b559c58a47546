"""The model of recipes/tiny.yaml, pretrained and fine-tuned (SFT): what benches of alignment start from. Made once in
out/align_tiny, in three or four minutes of one core, each seed for itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moesaic.align.align import align
from moesaic.recipe import Recipe, load_recipe
from moesaic.train.pretrain import pretrain

OUT = Path("out/align_tiny")
RECIPE = "recipes/align-tiny.yaml"


def stages(which: slice, seed: int, overrides: list[str]) -> Recipe:
    """The recipe with some of its stages."""
    kept = [stage | {"seed": seed} for stage in load_recipe(RECIPE).dump()["align"]["stages"][which]]
    return load_recipe(RECIPE, [f"align.stages={json.dumps(kept)}", *overrides])


def sft_model(seed: int) -> tuple[Path, dict[str, float]]:
    """Where the model is, and the seconds of computing it took to make."""
    base, found = OUT / f"{seed}-base", OUT / f"{seed}-sft"
    tiny = load_recipe("recipes/tiny.yaml", [f"train.seed={seed}"])
    seconds = {"pretrain": timed(base, lambda: pretrain(tiny, base, quiet=True))}
    seconds["sft"] = timed(found, lambda: align(stages(slice(-1), seed, []), base, found, quiet=True))
    return found, seconds


def timed(folder: Path, run: Callable[[], dict[str, Any]]) -> float:
    """Seconds of computing (on one core they are the time it takes, however busy the machine is), noted for when the
    run is there already. A run that was stopped goes on when it is asked for again."""
    done, begun = folder.with_suffix(".seconds"), folder.with_suffix(".begun")
    if not done.exists():
        before = float(begun.read_text()) if begun.exists() else 0.0
        start = time.process_time()
        summary = run()
        spent = str(before + time.process_time() - start)
        if (summary.get("stages") or [summary])[-1]["outcome"] == "stopped":
            begun.write_text(spent)
            raise SystemExit("stopped; the same command goes on")
        done.write_text(spent)
    return float(done.read_text())


def curve(folder: Path, key: str) -> list[tuple[int, float]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], round(row[key], 4)) for row in rows if key in row]
