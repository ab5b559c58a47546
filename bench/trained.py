"""One training run of a bench: its CPU seconds and its loss on held-out text, kept so that a bench can be gone on with.

Time is that of the process, on one thread: on a machine that others use too, the clock on the wall would measure them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import moesaic
from moesaic.model.transformer import Model
from moesaic.recipe import Recipe
from moesaic.train.loop import train
from moesaic.train.run import Run

Result = dict[str, Any]


def on_one_core(core: int) -> None:
    """This process alone on one core, so that it takes one thread and two benches do not share one."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core % (os.cpu_count() or 1)})


def bench_arguments(description: str | None, variants: Iterable[str], out: str) -> argparse.Namespace:
    """The options of a bench that trains variants with several seeds. It runs on its core from here on."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=list(variants), choices=variants)
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(out))
    arguments = parser.parse_args()
    on_one_core(arguments.core)
    arguments.out.mkdir(parents=True, exist_ok=True)
    return arguments


def trained(recipe: Recipe, out: Path, data: Path, held_out: Callable[[Model], float]) -> Result:
    """Train, or read what an earlier call found. One that was interrupted begins again, for the sake of its time."""
    file = out / "bench.json"
    if file.is_file():
        kept: Result = json.loads(file.read_text())
        return kept
    shutil.rmtree(out, ignore_errors=True)
    run = Run(recipe, out, data, quiet=True)
    run.draws = False
    began = time.process_time()
    train(run)
    seconds = time.process_time() - began
    if run.step < recipe.train.steps:
        raise SystemExit("stopped; the same command goes on")
    tokens = run.summary["tokens"]
    result = {"loss": held_out(moesaic.load(out)), "seconds": seconds, "steps": run.step, "tokens": tokens}
    file.write_text(json.dumps(result))
    return result


def against_plain(results: Mapping[str, Mapping[int, Result]], plain: str = "plain") -> list[Result]:
    """A row for each variant: means over the seeds that both have, and the differences seed by seed."""
    rows = []
    for name, by_seed in results.items():
        seeds = sorted(set(by_seed) & set(results[plain]))
        if not seeds:
            continue
        mine, base = [by_seed[seed] for seed in seeds], [results[plain][seed] for seed in seeds]
        gaps = [a["loss"] - b["loss"] for a, b in zip(mine, base)]
        rows.append(
            {
                "variant": name,
                "seeds": seeds,
                "loss": statistics.mean(one["loss"] for one in mine),
                "losses": [one["loss"] for one in mine],
                "gap": statistics.mean(gaps),
                "gap_error": statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else None,
                "seconds": statistics.mean(one["seconds"] for one in mine),
                "time_ratio": statistics.mean(b["seconds"] / a["seconds"] for a, b in zip(mine, base)),
                "tokens": mine[0]["tokens"],
            }
        )
    return rows


def table(rows: Sequence[Result]) -> str:
    lines = [f"{'variant':32}{'held-out loss':>14}{'against plain':>22}{'CPU s':>8}{'plain/it':>10}{'tokens':>11}"]
    for row in rows:
        error = f" ± {row['gap_error']:.4f}" if row["gap_error"] is not None else ""
        gap = f"{row['gap']:+.4f}{error}" if row["gap"] else ""
        lines.append(
            f"{row['variant']:32}{row['loss']:14.4f}{gap:>22}{row['seconds']:8.1f}{row['time_ratio']:9.2f}x"
            f"{row['tokens']:11,}"
        )
    return "\n".join(lines)
