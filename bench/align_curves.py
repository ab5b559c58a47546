"""Held-out accuracy of a tiny mixture before and after RL, over seeds: GRPO alone, with DAPO's pieces, and PPO with a
critic, also with the likelihood of right answers; what invariant mode shows of trainer and engine on the way.

    python -m bench.align_curves                      three seeds, the whole life of each: some minutes a seed
    python -m bench.align_curves --seeds 0 --variants dapo

Each seed is pretrained (recipes/tiny.yaml), fine-tuned (SFT), then aligned (recipes/align-tiny.yaml) by every variant
from the same SFT model. Runs are kept in out/align_tiny; a bench that was stopped resumes.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench.align_tiny import OUT, curve, sft_model, stages, timed
from bench.measure import record
from moesaic.align.align import align

PPO = [
    "align.stages.0.prompts=256",
    "align.stages.0.group=1",
    "align.stages.0.critic={lr: 0.001, pretrain: 5, decay: 1.0}",
]
VARIANTS = {
    # As GRPO was first written: every answer counts the same, and the ratio is clipped alike on both sides.
    "grpo": ["align.stages.0.level=sequence", "align.stages.0.objective={clip_high: 0.2}"],
    "dapo": ["align.stages.0.level=token", "align.stages.0.objective={clip_high: 0.28}", "align.stages.0.dynamic=2"],
    # As many answers, each to another question, and a critic in place of the group.
    "ppo": PPO,
    # And the likelihood of right answers (Seed1.5-Thinking's positive-example loss).
    "imitate": [*PPO, "align.stages.0.objective={clip_high: 0.28, imitate: 0.1}"],
}


def life(seed: int, variants: list[str], steps: int) -> list[dict[str, Any]]:
    model, seconds = sft_model(seed)
    before = curve(model, "accuracy")[-1][1]
    rows = []
    for name in variants:
        folder, recipe = (
            OUT / f"{seed}-{name}",
            stages(slice(-1, None), seed, [*VARIANTS[name], f"align.stages.0.steps={steps}"]),
        )
        took = timed(folder, lambda folder=folder, recipe=recipe: align(recipe, model, folder, quiet=True))
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
            "cpu_seconds": {key: round(value) for key, value in (seconds | {"policy": took}).items()},
        }
        print(
            f"seed {seed} {name:5} held-out accuracy {before:.3f} to {row['after']:.3f}"
            f"   {sum(row['cpu_seconds'].values())} CPU-seconds in all"
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
    parser.add_argument("--result", default="align_curves", help="name of the result's file")
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rows = [row for seed in arguments.seeds for row in life(seed, arguments.variants, arguments.steps)]
    if not arguments.no_record:
        record(arguments.result, rows)


if __name__ == "__main__":
    main()
