"""Replay that is chosen while a run goes on (Miro) beside fixed shares, on the three domains of bench/continual.py.

    python -m bench.replay_choice                   about eight seconds of one core for each of 5 variants and 3 seeds

The cost of a variant is the tokens that it replays and, where it chooses, those of its trials, which are undone. What
it buys is the mean loss of all domains at the end. Writes bench/results/replay_choice.json.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

from bench.continual import IN_TURN, STEPS, prepared, run_one
from bench.measure import machine, record
from bench.trained import bench_arguments

CHOOSE = "replay: 0.25, choose: {every: 40, steps: 4, replay: [0, 0.125, 0.25, 0.5], tolerance: TOLERANCE}"
SETTINGS = {
    "replay 0.125": "replay: 0.125",
    "replay 0.25": "replay: 0.25",
    "replay 0.5": "replay: 0.5",
    "chosen, within 0.02": CHOOSE.replace("TOLERANCE", "0.02"),
    "chosen, within 0.005": CHOOSE.replace("TOLERANCE", "0.005"),
}
VARIANTS = {name: [IN_TURN, f"train.memory={{ram: 32, disk: 1024, swap: 4, {one}}}"] for name, one in SETTINGS.items()}


def mean(values: Any) -> float:
    return statistics.mean(values)


def main() -> None:
    arguments = bench_arguments(__doc__, VARIANTS, "out/replay-choice-bench")
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, data = prepared(arguments.out)
    rows = []
    for name in arguments.only:
        found = []
        for seed in arguments.seeds:
            folder = arguments.out / f"{list(VARIANTS).index(name)}-{seed}"
            options = [*VARIANTS[name], f"train.seed={seed}", f"data.seed={seed}"]
            found.append(run_one(file, data, folder, options))
        rows.append(
            {
                "variant": name,
                "seeds": arguments.seeds,
                "losses": [mean(one["losses"][-1][n] for one in found) for n in range(3)],
                "mean": mean(mean(one["losses"][-1]) for one in found),
                "means": [mean(one["losses"][-1]) for one in found],
                "replayed": mean(one["replayed"] for one in found),
                "tried": mean(sum(choice["tokens"] for choice in one["choices"]) for one in found),
                "shares": [{choice["step"]: choice["replay"] for choice in one["choices"]} for one in found],
                "seconds": mean(one["seconds"] for one in found),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    record("replay_choice", rows, steps=STEPS, time="CPU seconds of the training loop; the machine was busy")
    print(machine())


if __name__ == "__main__":
    main()
