"""Several agents' answers, some of them liars: learned trust beside a majority vote and weights alone.

    python bench/know_trust.py

Honest agents err independently; liars agree on one lie in most questions and else answer like the others. The truth
comes to be known for some of the questions, after the decision. Shares of right decisions over all questions
and over the last half, with 95 % intervals over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from bench.measure import machine
from moesaic.know.answer.trust import TrustNetwork, majority


@dataclass(frozen=True)
class Case:
    honest: int = 5
    liars: int = 4
    accuracy: float = 0.7
    lie: float = 0.7  # share of the questions in which liars lie
    collude: bool = True
    verified: float = 0.2  # share of the questions whose truth comes to be known
    options: int = 6
    questions: int = 300


CASES = {
    "4 liars of 9 collude, 20 % verified": Case(),
    "5 liars of 9 collude, 20 % verified": Case(honest=4, liars=5),
    "6 liars of 9 collude, 20 % verified": Case(honest=3, liars=6),
    "5 liars of 9 collude, 5 % verified": Case(honest=4, liars=5, verified=0.05),
    "4 liars of 9 collude, none verified": Case(verified=0.0),
    "5 liars of 9 collude, none verified": Case(honest=4, liars=5, verified=0.0),
    "4 liars of 9 each alone, 20 % verified": Case(collude=False),
    "no liars, 20 % verified": Case(honest=9, liars=0),
}


class WithoutGroups(TrustNetwork):
    """The same weights, and every agent a voice of its own."""

    def groups(self, agents: object) -> list[list[str]]:
        return [[agent] for agent in agents]  # type: ignore[attr-defined]


def simulate(case: Case, seed: int) -> dict[str, tuple[float, float]]:
    rng = random.Random(seed)
    networks = {"trust": TrustNetwork(), "weights alone": WithoutGroups()}
    right: dict[str, list[bool]] = {name: [] for name in ("majority", *networks)}
    for _ in range(case.questions):
        answers = said(case, rng)
        known = rng.random() < case.verified
        right["majority"].append(majority(answers) == "0")
        for name, network in networks.items():
            decision = network.decide(answers)
            right[name].append(decision.answer == "0")
            if known:
                network.verified("0")
            else:
                network.agreed(decision)
    half = case.questions // 2
    return {name: (sum(one) / len(one), sum(one[half:]) / len(one[half:])) for name, one in right.items()}


def said(case: Case, rng: random.Random) -> dict[str, str]:
    """The truth is "0"."""

    def try_it() -> str:
        return "0" if rng.random() < case.accuracy else str(rng.randrange(1, case.options))

    answers = {f"honest {n}": try_it() for n in range(case.honest)}
    lie, lies = str(rng.randrange(1, case.options)), rng.random() < case.lie
    for n in range(case.liars):
        alone = str(rng.randrange(1, case.options))
        answers[f"liar {n}"] = (lie if case.collude else alone) if lies else try_it()
    order = sorted(answers)
    rng.shuffle(order)
    return {agent: answers[agent] for agent in order}


def interval(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values))
    return mean, 1.96 * spread


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    told = {}
    for name, case in CASES.items():
        runs = [simulate(case, seed) for seed in range(given.seeds)]
        row = {who: [interval([run[who][part] for run in runs]) for part in (0, 1)] for who in runs[0]}
        told[name] = row
        print(name)
        for who, (whole, late) in row.items():
            print(f"  {who:14} {whole[0]:.3f} ± {whole[1]:.3f}   last half {late[0]:.3f} ± {late[1]:.3f}")
    if given.json:
        given.json.write_text(json.dumps({"bench": "know_trust", "machine": machine(), "cases": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
