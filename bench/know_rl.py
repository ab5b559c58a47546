"""A policy learns to search generated multi-hop worlds (RAG-Gym): success on held-out worlds before and after SFT on
filtered trajectories, DPO on steps, GRPO with outcome and with process rewards, and with a critic that chooses.

    python -m bench.know_rl                                    a tiny policy, made from nothing; ten minutes of a core
    python -m bench.know_rl --model out/smollm2 --device cuda  a real one (moesaic convert smollm2 out/smollm2)
    python -m bench.know_rl --seeds 1 --variants grpo_process --no-record         one row: the same command without
                                                                                  these collects what is there

Every variant starts from the same policy, with several seeds. The worlds that are asked about share no name, nor a part
of one, with those that are trained in. Intervals are Wilson's, at 95 %, of all seeds together where nothing else is
said. Runs and rows are kept in out/know_rl; a bench that was stopped resumes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.align_tiny import curve, timed
from bench.know_rl_policy import tiny_policy, told_policy
from bench.measure import record
from moesaic import atomic
from moesaic.align.align import align
from moesaic.evaluate.backends import Answer, Backend, EngineBackend
from moesaic.evaluate.best_of_n import BestOfNBackend
from moesaic.evaluate.interval import wilson
from moesaic.evaluate.suites.agents import Attempt
from moesaic.recipe import Recipe, load_recipe
from moesaic.worlds.critic import Candidates, Critic
from moesaic.worlds.environments.multihop import Multihop
from moesaic.worlds.example import Example
from moesaic.worlds.text_actions import World

PAIRS = "trajectories/pairs.jsonl"
VARIANTS = ("trajectories", "step_dpo", "critic", "grpo_outcome", "grpo_process", "then_grpo")
TINY_WORLD: dict[str, Any] = {
    "turns": 4,
    "people": 5,
    "passages": 1,
    "documents": "facts",
    "instructions": "",
    "relations": ("birthplace", "employer", "teacher", "country", "headquarters", "founder"),
    "short_names": True,
}
WORLD: dict[str, Any] = {"turns": 5, "people": 6, "passages": 2}


@dataclass(frozen=True)
class Sizes:
    """Of a run: how long each stage is, how much it samples, how fast it learns."""

    prompts: int  # episodes that are branched
    group: int
    sft_steps: int
    pair_steps: int
    policy_steps: int
    policy_prompts: int
    max_tokens: int
    lr: dict[str, float]  # of sft, preference, reward_model, policy
    optimizer: str


TINY = Sizes(96, 8, 15, 40, 48, 16, 12, {"sft": 0.001, "pair": 0.0003, "critic": 0.001, "policy": 0.001}, "adamw")
REAL = Sizes(256, 8, 40, 80, 40, 16, 64, {"sft": 1e-5, "pair": 1e-6, "critic": 1e-5, "policy": 2e-6}, "adamw")


def recipe(folder: Path, stage: dict[str, Any], optimizer: str) -> Recipe:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stage['name']}.json"
    whole = {
        "align": {"stages": [stage | {"evaluate_every": 0}]},
        "optimizer": {"name": optimizer, "lr": stage["lr"], "weight_decay": 0.0},
        "schedule": {"name": "wsd", "decay": 0.3},
    }
    file.write_text(json.dumps(whole))
    return load_recipe(file)


def variants(sizes: Sizes, environment: dict[str, Any], folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """The one stage of each."""
    pairs = [{"path": str(folder / "trajectories" / PAIRS)}]
    policy = {
        "name": "policy",
        "steps": sizes.policy_steps,
        "lr": sizes.lr["policy"],
        "environment": environment,
        "prompts": sizes.policy_prompts,
        "group": sizes.group,
        "max_tokens": sizes.max_tokens,
        "objective": {"clip_high": 0.28},
        "seed": seed,
    }
    learn_pairs = {"steps": sizes.pair_steps, "data": pairs, "batch_pairs": 32, "seed": seed}
    process = policy | {"rewards": [{"name": "environment"}, {"name": "process", "by": "mean", "weight": 1.0}]}
    return {
        "trajectories": {
            "name": "trajectories",
            "steps": sizes.sft_steps,
            "lr": sizes.lr["sft"],
            "environment": environment,
            "prompts": sizes.prompts,
            "group": sizes.group,
            "max_tokens": sizes.max_tokens,
            "batch_tokens": 2048,
            "seed": seed,
        },
        "critic": {"name": "reward_model", "lr": sizes.lr["critic"], **learn_pairs},
        # Without the SFT term, what is chosen becomes less likely too, only more slowly.
        "step_dpo": {
            "name": "preference",
            "lr": sizes.lr["pair"],
            "objective": {"beta": 0.1, "sft": 1.0},
            **learn_pairs,
        },
        "grpo_outcome": policy | {"rewards": [{"name": "environment"}]},
        "grpo_process": process,
        "then_grpo": process | {"steps": max(2, sizes.policy_steps // 2)},
    }


class Chance:
    """A critic that knows nothing."""

    def __init__(self) -> None:
        self.draw = torch.Generator().manual_seed(0)

    def scores(self, candidates: Candidates, tools: Any = None) -> list[list[float]]:
        return [torch.rand(len(texts), generator=self.draw).tolist() for _, texts in candidates]


def success(
    backend: Backend, world: World, worlds: int, max_tokens: int, examples: Sequence[Example] | None = None
) -> dict[str, Any]:
    """The share of held-out tasks, or of these, that are done rightly, all episodes turn by turn together."""
    examples = examples or [world.example(number) for number in range(worlds)]
    started = [world.begin(example) for example in examples]
    attempts = [Attempt("", episode, world.turns, list(episode.messages)) for episode in started]
    while going := [attempt for attempt in attempts if attempt.outcome is None]:
        answers: dict[int, Answer] = {}
        backend.answer([attempt.messages for attempt in going], max_tokens, answers.__setitem__)
        for number, attempt in enumerate(going):
            attempt.hear(answers[number])
    right = sum(attempt.score for attempt in attempts)
    searches = sum(attempt.turn - 1 for attempt in attempts)
    return {"success": right / worlds, "interval": wilson(right, worlds), "queries": searches / worlds}


def asked(policy: Path, critic: Path | None, world: World, worlds: int, sizes: Sizes, device: str) -> dict[str, Any]:
    """Greedy and sampled, or the best of several by the critic."""
    model = moesaic.load(policy, device=device)
    if critic is None:
        found = {"greedy": EngineBackend(model), "sampled": BestOfNBackend(model, Chance(), 1)}
    else:
        found = {"by_critic": BestOfNBackend(model, Critic.open(critic, device=device), sizes.group)}
    return {way: success(backend, world, worlds, sizes.max_tokens) for way, backend in found.items()}


def told(name: str, row: dict[str, Any]) -> None:
    ways = [
        f"{way} {one['success']:.3f} ({one['interval'][0]:.3f} to {one['interval'][1]:.3f})"
        for way, one in row["asked"].items()
    ]
    mismatch = f"   max |Δlogp| {row['mismatch_max']:g}" if "mismatch_max" in row else ""
    print(f"{name:14} {'   '.join(ways)}   {row['cpu_seconds']:.0f} CPU-seconds{mismatch}", flush=True)


@dataclass(frozen=True)
class Bench:
    """Rows of one seed, each made once."""

    policy: Path
    folder: Path  # of the seed
    stages: dict[str, dict[str, Any]]
    sizes: Sizes
    world: World
    worlds: int
    device: str

    def trained(self, name: str) -> float:
        """A run from the start, or from what the trajectories made of it, and what computing it took."""
        policy = self.folder / "trajectories" if name == "then_grpo" else self.policy
        run = recipe(self.folder / "recipes" / name, self.stages[name], self.sizes.optimizer)
        return timed(self.folder / name, lambda: align(run, policy, self.folder / name, quiet=True))

    def row(self, name: str) -> dict[str, Any]:
        file = self.folder / f"{name}.row.json"
        if not file.exists():
            atomic.write_json(file, self._row(name))
        row: dict[str, Any] = json.loads(file.read_text())
        told(name, row)
        return row

    def _row(self, name: str) -> dict[str, Any]:
        sizes, world = self.sizes, self.world
        if name == "critic":
            seconds = self.trained("trajectories") + self.trained("critic")
            found = asked(self.policy, self.folder / "critic", world, self.worlds, sizes, self.device)
            return {"asked": found, "cpu_seconds": seconds}
        if name in ("step_dpo", "then_grpo"):
            self.trained("trajectories")  # whose pairs it learns from, or from where it goes on
        seconds = self.trained(name)
        row = {"asked": asked(self.folder / name, None, world, self.worlds, sizes, self.device), "cpu_seconds": seconds}
        if "grpo" in name:
            row["mismatch_max"] = max(value for _, value in curve(self.folder / name, "mismatch_max"))
            row["reward"] = curve(self.folder / name, "reward")
        return row


def together(rows: list[dict[str, Any]], worlds: int) -> dict[str, dict[str, Any]]:
    """Of all seeds."""
    found = {}
    for way in rows[0]["asked"]:
        share = sum(row["asked"][way]["success"] for row in rows) / len(rows)
        count = worlds * len(rows)
        found[way] = {"success": share, "interval": wilson(share * count, count)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a policy that can follow instructions, in place of the tiny one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--form", default="direct", help="how it speaks: direct, react, re2search")
    parser.add_argument("--steps", type=int, default=300, help="of the tiny policy's SFT")
    parser.add_argument("--worlds", type=int, default=200, help="held-out questions, each of a world of its own")
    parser.add_argument("--scale", type=float, default=1.0, help="of the stages' steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the stages; the start is one")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=Path("out/know_rl"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    sizes, options = (TINY, TINY_WORLD) if arguments.model is None else (REAL, WORLD)
    scaled = {
        name: max(2, round(getattr(sizes, name) * arguments.scale))
        for name in ("sft_steps", "pair_steps", "policy_steps")
    }
    sizes = Sizes(**vars(sizes) | scaled | {"prompts": max(16, round(sizes.prompts * min(1.0, arguments.scale)))})
    options = options | {"form": arguments.form}
    folder = arguments.out / ("tiny" if arguments.model is None else arguments.model.name)
    world = Multihop(**options)
    policy = folder / "sft"

    def make() -> dict[str, Any]:
        if arguments.model is None:
            tiny_policy(world, folder, 0, arguments.steps)
        else:
            told_policy(world, folder, 0, arguments.model)
        return {"outcome": "done"}

    seconds = timed(policy, make)
    start = folder / "start.row.json"
    if not start.exists():
        found = asked(policy, None, world, arguments.worlds, sizes, arguments.device)
        atomic.write_json(start, {"asked": found, "cpu_seconds": seconds})
    rows = [{"variant": "start"} | json.loads(start.read_text())]
    told("start", rows[0])
    for name in arguments.variants:
        own = []
        for seed in arguments.seeds:
            place = folder / f"seed-{seed}"
            stages = variants(sizes, {"name": "multihop"} | options, place, seed)
            bench = Bench(policy, place, stages, sizes, world, arguments.worlds, arguments.device)
            own.append({"variant": name, "seed": seed} | bench.row(name))
        rows += own
        if len(own) > 1:
            rows.append({"variant": name, "seeds": arguments.seeds, "asked": together(own, arguments.worlds)})
    if not arguments.no_record:
        which = "know_rl" if arguments.model is None else f"know_rl_{arguments.model.name}"
        total = sum(row.get("cpu_seconds", 0.0) for row in rows)
        record(which, rows, worlds=arguments.worlds, world=options, cpu_seconds=total)


if __name__ == "__main__":
    main()
