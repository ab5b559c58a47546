"""Samples per prompt, with a fixed reward model: the study of recipes/rlhf-scaling.yaml, cut to minutes of one core.

    python -m bench.rlhf_scaling

The policy and the reward model begin as the model of bench/align_tiny.py. Each cell trains a reward model on 384 pairs
for 16 steps and a policy for 8. Cells are kept in out/scaling-group: a stopped bench goes on.
"""

from __future__ import annotations

from pathlib import Path

from bench.align_tiny import sft_model
from bench.measure import record
from moesaic.align.study import plain, run_study
from moesaic.recipe import load_recipe

OVERRIDES = [
    *(f"align.stages.0.{option}" for option in ("steps=16", "save_every=100", "pairs=384")),
    *(f"align.stages.1.{option}" for option in ("steps=8", "evaluate_every=8", "evaluate=96", "save_every=100")),
    "study.axes={align.stages.1.group: [2, 4, 8]}",
    "study.seeds=[0, 1, 2]",
]


def main() -> None:
    recipe = load_recipe("recipes/rlhf-scaling.yaml", OVERRIDES)
    found = run_study(recipe, sft_model(0)[0], Path("out/scaling-group"), on_status=lambda status: None, log=print)
    print(found.text())
    print(record("rlhf_scaling", plain(found)["rows"], cells=found.cells, measure=found.measure))


if __name__ == "__main__":
    main()
