"""SRT: rollouts of the same questions, epoch after epoch, with and without the suffix trees that outlive a request.

    python -m bench.align_srt DIR                 DIR: a model that answers builtin:sums, such as out/aligned

Each epoch asks the same questions with other seeds, as training does; the trees of the first epoch are what the second
guesses from. Answers are equal with and without guesses, token for token: a draw is a hash of its seed and place, and a
guess is accepted exactly if it is what was drawn. Weights are nudged between epochs, as an update would.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

import moesaic
from bench.measure import record
from moesaic.align.examples import TaskExamples
from moesaic.align.rollout import roll, seed_of
from moesaic.kernels import probe
from moesaic.serve.drafters import Drafter
from moesaic.serve.drafters.suffix import Suffix


def epochs(folder: Path, drafter: Drafter | None, count: int, questions: int, group: int, nudge: float) -> list[dict]:
    model = moesaic.load(folder)
    model.mode = "invariant"
    engine = moesaic.Engine(model, drafter=drafter, most_requests=questions * group, seed=0)
    asked = [TaskExamples("sums", "train")[n] for n in range(questions)]
    generator, rows = torch.Generator().manual_seed(0), []
    for epoch in range(count):
        start = time.perf_counter()
        wishes = {"max_tokens": 48, "temperature": 1.0}
        rolled = roll(engine, asked, group, wishes, [], [seed_of(epoch, n) for n in range(questions)])
        rows.append(
            {
                "seconds": time.perf_counter() - start,
                "tokens_per_pass": rolled.generated / rolled.steps,
                "passes": rolled.steps,
                "answers": [sample.tokens for answers in rolled.groups for sample in answers],
            }
        )
        with torch.no_grad():
            for weight in model.parameters():
                weight += nudge * weight.std() * torch.randn(weight.shape, generator=generator)
        engine.weights_changed()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--nudge", type=float, default=0.002, help="of every weight, in units of its matrix's spread")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    torch.set_num_threads(probe.threads())
    settings = (arguments.epochs, arguments.questions, arguments.group, arguments.nudge)
    plain = [epochs(arguments.model, None, *settings) for _ in range(arguments.rounds)]
    guessed = [epochs(arguments.model, Suffix(), *settings) for _ in range(arguments.rounds)]
    rows = []
    for epoch in range(arguments.epochs):
        without = min(run[epoch]["seconds"] for run in plain)
        with_trees = min(run[epoch]["seconds"] for run in guessed)
        equal = all(run[epoch]["answers"] == plain[0][epoch]["answers"] for run in guessed)
        row = {
            "epoch": epoch + 1,
            "passes": [plain[0][epoch]["passes"], guessed[0][epoch]["passes"]],
            "tokens_per_pass_ratio": round(plain[0][epoch]["passes"] / guessed[0][epoch]["passes"], 2),
            "seconds": [round(without, 3), round(with_trees, 3)],
            "speed_ratio": round(without / with_trees, 2),
            "answers_equal": equal,
        }
        print(
            f"epoch {epoch + 1}: passes {row['passes'][0]} against {row['passes'][1]} with trees "
            f"({row['tokens_per_pass_ratio']:.2f}x tokens a pass), {without:.2f} s against {with_trees:.2f} s: "
            f"{row['speed_ratio']:.2f}x; answers equal: {equal}"
        )
        rows.append(row)
    if not arguments.no_record:
        record("align_srt", rows, questions=arguments.questions, group=arguments.group, nudge=arguments.nudge)


if __name__ == "__main__":
    main()
