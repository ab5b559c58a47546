"""EAGLET with tiny models: what a planner is worth to executors that do not learn, after each of its stages.

    python -m bench.planner                     some ten minutes of a core
    python -m bench.planner --seeds 0           six

The world is a small game of cards against a player whose habit is told. Executors are made from nothing by SFT on
games that follow the plan below their task, whichever it is, and on careless games where there is none: they can do
what they are told, and do not know what fits. Three of one family: `early`, `middle` and `late` in the same run. The
planner's start goes on from `late` and has seen six plans, half of the time one that loses, and one in four times the
one of three that beats the habit at hand: it can read, and seldom says what fits.

Then `cold` is the cold start with homologous consensus (plans that help `early` and `late`), `alone` the same without
it (plans that help `late`), and `grpo` what the policy stage makes of `cold` by the gain of `late`. Each is asked for
plans of held-out games, greedily, and every executor plays them once, `middle` too, which no planner was trained with.
Won is 1, a draw a half; intervals are Wilson's, at 95 %, of all seeds together.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import moesaic
from bench.align_tiny import curve
from bench.align_worlds import PIECES
from bench.measure import record
from bench.worlds_policy import empty_model, text_of, trained, world_of, write
from moesaic import atomic
from moesaic.evaluate.interval import wilson
from moesaic.serve.core.engine import Engine
from moesaic.serve.parsers import Message
from moesaic.worlds.environments.cards import TOLD, Game
from moesaic.worlds.environments.planner import HINT, REQUEST, told
from moesaic.worlds.playing import EnginePlayer, play
from moesaic.worlds.text_actions import Acting, World, WorldExamples

Rule = Callable[[Game], int]


def above(expected: Callable[[Game], int]) -> Rule:
    """One above what the opponent is expected to play, or the lowest where that cannot be."""
    return lambda game: card if (card := expected(game) + 1) in game.hand else min(game.hand)


PLANS: dict[str, Rule] = {
    "Beat the number of the prize.": above(lambda game: game.prizes[0]),
    "Beat its highest card.": above(lambda game: max(game.theirs)),
    "Beat its lowest card.": above(lambda game: min(game.theirs)),
    "Play the highest card.": lambda game: max(game.hand),
    "Play the lowest card.": lambda game: min(game.hand),
    "Play the number of the prize.": lambda game: game.prizes[0] if game.prizes[0] in game.hand else min(game.hand),
}
FITTING = dict(zip(TOLD, PLANS, strict=False))  # plans and habits are listed in the same order
HABIT = "Play the lowest card."
FAMILY = {"early": 120, "middle": 80, "late": 120}  # steps of SFT, each behind the one before
EXECUTOR = {"max_tokens": 12, "temperature": 0.7}


def games(world: World, count: int) -> Iterator[dict[str, Any]]:
    """Three in four follow a plan; the others have none, and play any card."""
    examples, draw = WorldExamples(world, 1_000), random.Random("followed plans")
    for number in range(count):
        episode = world.begin(examples[number])
        assert isinstance(episode, Acting) and isinstance(episode.simulation, Game)
        game = episode.simulation
        plan = draw.choice(list(PLANS)) if draw.random() < 0.75 else ""
        messages, done = told(episode.messages, after=f"{HINT}{plan}" if plan else ""), False
        while not done:
            said = f"Action: play {PLANS[plan](game) if plan else draw.choice(game.hand)}"
            step = episode.step(Message(said))
            messages += [{"role": "assistant", "content": said}, *([] if step.done else step.messages)]
            done = step.done
        yield {"messages": messages}


def fitting(task: str) -> str:
    """The plan that beats the habit that a task tells."""
    (habit,) = (habit for habit in FITTING if habit in task)
    return FITTING[habit]


def careless_plans(world: World, count: int) -> Iterator[dict[str, Any]]:
    examples, draw = WorldExamples(world, 1_001), random.Random("careless plans")
    for number in range(count):
        asked = told(examples[number].messages, before=REQUEST)
        fits, any_plan = fitting(str(asked[-1]["content"])), draw.choice(list(PLANS))
        (plan,) = draw.choices((HABIT, fits, any_plan), (0.5, 0.25, 0.25))
        yield {"messages": [*asked, {"role": "assistant", "content": plan}]}


def start_models(world: World, folder: Path) -> tuple[dict[str, Path], Path, float]:
    """The executors, the planner's start, and the seconds that they took."""
    files = {"games": folder / "games.jsonl", "plans": folder / "plans.jsonl"}
    if not files["plans"].exists():
        write(files["games"], games(world, 6_000))
        write(files["plans"], careless_plans(world, 4_000))
    lines = [json.loads(line) for file in files.values() for line in file.read_text().splitlines()[:2_000]]
    model = empty_model(text_of(lines), folder, 0, vocabulary=1024, pieces=PIECES)
    sft, seconds = {"name": "sft", "batch_tokens": 2048, "data": [{"path": str(files["games"])}]}, 0.0
    family = {}
    for number, (name, steps) in enumerate(FAMILY.items()):
        seconds += trained([sft | {"steps": steps, "seed": number}], model, folder / name, lr=0.01)
        model = family[name] = folder / name
    planner = sft | {"steps": 100, "data": [{"path": str(files["plans"])}]}
    return family, folder / "start", seconds + trained([planner], family["late"], folder / "start", lr=0.005)


def plans_of(planner: Path, world: World, count: int) -> list[str]:
    examples = [world.example(number) for number in range(count)]
    player = EnginePlayer(Engine(moesaic.load(planner, threads=1), max_requests=64, seed=0), {"max_tokens": 24})
    said = player.say([(n, told(example.messages, before=REQUEST)) for n, example in enumerate(examples)])
    return [(text or "").strip() for text in said]


def won(executor: Path, world: World, plans: list[str]) -> float:
    """The mean reward of one held-out game with each plan; without one where it is empty."""
    player = EnginePlayer(Engine(moesaic.load(executor, threads=1), max_requests=64, seed=0), EXECUTOR)
    texts = [f"{HINT}{plan}" if plan else "" for plan in plans]
    played = play(player, world, [world.example(number) for number in range(len(plans))], texts)
    return sum(one.reward for one in played) / len(played)


def asked(planner: Path | None, family: dict[str, Path], world: World, count: int, file: Path) -> dict[str, float]:
    """Of each executor what it wins with the planner's plans, and the share of plans that fit the habit."""
    if not file.exists():
        plans = [""] * count if planner is None else plans_of(planner, world, count)
        found = {name: won(executor, world, plans) for name, executor in family.items()}
        tasks = (str(world.example(number).messages[-1]["content"]) for number in range(count))
        found["fitting"] = sum(plan == fitting(task) for plan, task in zip(plans, tasks, strict=True)) / count
        atomic.write_json(file, found)
    values: dict[str, float] = json.loads(file.read_text())
    return values


def row(name: str, found: list[dict[str, float]], count: int, **facts: Any) -> dict[str, Any]:
    line: dict[str, Any] = {"planner": name, **facts, "by_seed": found}
    for key in found[0]:
        share, every = sum(one[key] for one in found) / len(found), count * len(found)
        line[key] = [round(number, 3) for number in (share, *wilson(share * every, every))]
    print(json.dumps({key: value for key, value in line.items() if key != "curves"}), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=48, help="of the cold start, six plans each")
    parser.add_argument("--cold-steps", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25, help="of GRPO, twelve games of eight plans each")
    parser.add_argument("--attempts", type=int, default=2, help="of an executor with a plan")
    parser.add_argument("--games", type=int, default=200, help="held out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the stages; the starts are one")
    parser.add_argument("--out", type=Path, default=Path("out/planner"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    given = parser.parse_args()
    folder: Path = given.out
    world = world_of("cards")
    family, start, seconds = start_models(world, folder)
    rows = [  # of the executors alone, and with the start's plans
        row(
            name,
            [asked(planner, family, world, given.games, folder / f"{name}.row.json")],
            given.games,
            seconds=[seconds],
        )
        for name, planner in (("none", None), ("start", start))
    ]
    late, both = str(family["late"]), [str(family["early"]), str(family["late"])]
    plan = {"name": "planner", "world": {"name": "cards"}, "attempts": given.attempts, **EXECUTOR}
    cold = {"name": "trajectories", "prompts": given.episodes, "group": 6, "right": 0.3, "steps": given.cold_steps}
    cold |= {"max_tokens": 24, "batch_tokens": 1024, "pairs": 1}
    policy = {"name": "policy", "steps": given.steps, "prompts": 12, "group": 8, "max_tokens": 24}
    policy |= {"rewards": [{"name": "environment"}], "environment": plan | {"executor": late}}
    stages: dict[str, tuple[str, dict[str, Any], float]] = {
        "cold": ("start", cold | {"environment": plan | {"executor": both, "by": "min"}}, 0.001),
        "alone": ("start", cold | {"environment": plan | {"executor": late}}, 0.001),
        "grpo": ("cold", policy, 0.001),
    }
    for name, (before, stage, rate) in stages.items():
        found, facts = [], {"seconds": [], "curves": []}  # type: ignore[var-annotated]
        for seed in given.seeds:
            place = folder / f"{name}-{seed}"
            model = start if before == "start" else folder / f"{before}-{seed}"
            facts["seconds"].append(trained([stage | {"seed": seed}], model, place, lr=rate, optimizer="adamw"))
            facts["curves"].append(curve(place, "reward" if stage["name"] == "policy" else "episodes_kept"))
            found.append(asked(place, family, world, given.games, place.with_suffix(".row.json")))
        rows.append(row(name, found, given.games, **facts))
    if not given.no_record:
        record("planner", rows, games=given.games, attempts=given.attempts, steps=given.steps, episodes=given.episodes)


if __name__ == "__main__":
    main()
