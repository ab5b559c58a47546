"""One tiny policy learns in two worlds at once (`environment: several`): a game of cards, and searching for what takes
several hops. Held-out tasks done in each at the start and at the end, from GRPO on the worlds' own rewards.

    python -m bench.align_two_worlds                a quarter of an hour of a core
    python -m bench.align_two_worlds --seeds 0      eight minutes

The start is made from nothing: SFT on right episodes of both worlds by turns, from which it learns to read and to act,
then on bad ones, from which it learns habits that lose (bench/worlds_policy.py, bench/know_rl_policy.py). A policy of
its own for each world is in bench/align_worlds.py and bench/know_rl.py. Intervals are Wilson's, at 95 %; a draw is half
a win. Runs and rows are kept in out/align_two_worlds; a bench that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import moesaic
from bench import know_rl_policy
from bench.align_tiny import curve
from bench.align_worlds import CARELESS
from bench.know_rl import TINY_WORLD, Sizes, asked, together, told
from bench.measure import record
from bench.worlds_policy import demonstrations, empty_model, text_of, trained, world_of, write
from moesaic import atomic
from moesaic.worlds.environments.multihop import Multihop
from moesaic.worlds.text_actions import World

WORLDS: dict[str, dict[str, Any]] = {"cards": {}, "multihop": TINY_WORLD | {"form": "direct"}}
# In a game what stands before a number is one piece; elsewhere, where there are no numbers, names are syllables.
PIECES = rf"\d(?:, \d)*|[^\d]+(?=\d)|{know_rl_policy.SYLLABLES}"


def shown(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Files of demonstrations, as sources: right ones and careless ones, of both worlds."""
    sources: dict[str, list[dict[str, str]]] = {"right": [], "careless": []}
    hops = Multihop(**WORLDS["multihop"])
    for kind, counts in {"right": (4_000, 9_000), "careless": (4_000, 3_000)}.items():
        careless = kind == "careless"
        for name, count in zip(WORLDS, counts, strict=True):
            file = folder / f"{name}-{kind}.jsonl"
            sources[kind].append({"path": str(file)})
            if file.exists():
                continue
            if name == "cards":
                lines = demonstrations(name, count, 1000 * careless, CARELESS * careless)
            else:
                lines = know_rl_policy.demonstrations(hops, count, 3 * careless, 1.0 - careless)
            write(file, ({"messages": line["messages"]} for line in lines))
    return sources


def start_model(folder: Path, steps: int) -> tuple[Path, float]:
    """Can do both, and seldom does. The seconds that SFT took."""
    sources = shown(folder)
    texts: list[dict[str, Any]] = []
    for source in sources["right"]:
        texts += map(json.loads, Path(source["path"]).read_text().splitlines()[:2_000])
    base = empty_model(text_of(texts), folder, 0, vocabulary=2048, pieces=PIECES)
    sft = {"name": "sft", "batch_tokens": 2048}
    right = sft | {"steps": steps, "data": sources["right"]}
    careless = sft | {"steps": steps // 5, "data": sources["careless"]}  # habits are learned sooner
    seconds = trained([right], base, folder / "right", lr=0.01)
    return folder / "start", seconds + trained([careless], folder / "right", folder / "start", lr=0.004, decay=0.9)


def row(model: Path, worlds: dict[str, World], count: int, sizes: Sizes, seconds: float) -> dict[str, Any]:
    """What a policy does in each of the worlds; asked once."""
    file = model.with_suffix(".row.json")
    if not file.exists():
        found = {name: asked(model, None, world, count, sizes, "cpu") for name, world in worlds.items()}
        atomic.write_json(file, {"asked": found, "cpu_seconds": seconds})
    line: dict[str, Any] = json.loads(file.read_text())
    for name in worlds:
        told(f"{model.name} {name}", {"asked": line["asked"][name], "cpu_seconds": line["cpu_seconds"]})
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=24, help="of a step, half in each world; 8 episodes each")
    parser.add_argument("--tasks", type=int, default=200, help="held out, in each world")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of GRPO; the start is one")
    parser.add_argument("--out", type=Path, default=Path("out/align_two_worlds"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    folder: Path = arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    worlds = {name: world_of(name, **options) for name, options in WORLDS.items()}
    sizes = Sizes(0, 8, 0, 0, arguments.steps, arguments.prompts, 12, {"policy": 0.002}, "adamw")
    start, seconds = start_model(folder, arguments.sft_steps)
    rows: list[dict[str, Any]] = [{"row": "start"} | row(start, worlds, arguments.tasks, sizes, seconds)]
    both = {"name": "several", "worlds": [{"name": name} | options for name, options in WORLDS.items()]}
    stage = {"name": "policy", "steps": arguments.steps, "prompts": arguments.prompts, "group": sizes.group}
    stage |= {"environment": both, "rewards": [{"name": "environment"}], "max_tokens": sizes.max_tokens}
    stage |= {"objective": {"clip_high": 0.28}}
    own = []
    for seed in arguments.seeds:
        place = folder / f"seed-{seed}"
        spent = trained([stage | {"seed": seed}], start, place, lr=sizes.lr["policy"], optimizer="adamw")
        line = {"row": "grpo", "seed": seed} | row(place, worlds, arguments.tasks, sizes, spent)
        mismatch = max(value for _, value in curve(place, "mismatch_max"))
        own.append(line | {"mismatch_max": mismatch, "reward": curve(place, "reward")})
    for name in worlds:
        of_world = [{"asked": line["asked"][name]} for line in own]
        found = together(of_world, arguments.tasks)
        rows.append({"row": "grpo", "world": name, "seeds": arguments.seeds, "asked": found})
    if not arguments.no_record:
        parameters = sum(parameter.numel() for parameter in moesaic.load(start).parameters())
        options = {"steps": arguments.steps, "prompts": arguments.prompts, "sft_steps": arguments.sft_steps}
        record("align_two_worlds", [*rows, *own], tasks=arguments.tasks, parameters=parameters, **options)


if __name__ == "__main__":
    main()
