"""How many planted false citations the checker catches, and how many true ones it keeps, on passages of real questions.

    python bench/know_citations.py --data DATA/hotpotqa --data DATA/musique --json bench/results/know_citations.json
    python bench/know_citations.py --text wikitext2_valid.txt --fixed

Half of the documents, by a hash of their titles, choose the limits; the other half is reported, kind by kind, with 95 %
intervals (Wilson). `--show 5` prints what was decided wrongly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

from bench.measure import machine
from bench.planted_citations import FALSE, NOT_PROMISED, TRUE, Planted, plants, read_sets, read_wikitext
from moesaic.know.answer.claims import Lexicon
from moesaic.know.answer.support import LIMITS, Limits, Source

GRID = [Limits(score / 20, words / 20) for score in range(8, 18) for words in range(4, 17)]
WANTED = 0.96  # above what is promised, 0.95, because the other half may come out lower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, action="append", default=[], help="a folder with qa_train.json")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a file of WikiText")
    parser.add_argument(
        "--fixed", action="store_true", help="the checker's own limits: nothing is chosen, all is shown"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=0, help="wrong decisions to print of each kind, of the first half")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sets = [one for folder in given.data for one in read_sets(folder)]
    sets += [one for file in given.text for one in read_wikitext(file)]
    if not sets:
        parser.error("name texts with --data or --text")
    planted = plants(sets, given.seed)
    lexicon = Lexicon.of(passage.text for one in sets for passage in one)
    halves: tuple[list[Planted], list[Planted]] = ([], [])
    for one in planted:
        halves[given.fixed or hashlib.sha256(one.about.encode()).digest()[0] % 2].append(one)
    began = time.process_time()
    limits = LIMITS if given.fixed else chosen(halves[0], lexicon)
    seconds = time.process_time() - began
    if given.show:
        show(halves[0], lexicon, limits, given.show)
    began = time.process_time()
    right = decide(halves[1], lexicon, limits)
    each = (time.process_time() - began) / max(1, len(halves[1]))
    rows = {kind: tally(right, halves[1], [kind]) for kind in (*TRUE, *FALSE, *NOT_PROMISED)}
    rows["true kept"] = tally(right, halves[1], TRUE)
    rows["false caught"] = tally(right, halves[1], FALSE)
    print(f"{limits}, chosen on {len(halves[0])} statements ({seconds:.1f} s of processor time); the other half:")
    print(f"{each * 1000:.2f} ms a statement")
    for kind, (share, low, high, count) in rows.items():
        print(f"{kind:24} {share:7.1%}  [{low:.1%}, {high:.1%}]  of {count}")
    if given.json:
        told = {kind: dict(zip(("share", "low", "high", "count"), row, strict=True)) for kind, row in rows.items()}
        given.json.write_text(
            json.dumps(
                {
                    "bench": "know_citations",
                    "machine": machine(),
                    "limits": vars(limits),
                    "ms": each * 1000,
                    "kinds": told,
                },
                indent=1,
            )
            + "\n"
        )


def decide(planted: list[Planted], lexicon: Lexicon, limits: Limits) -> list[bool]:
    return [
        Source(one.cited.title, one.cited.text, lexicon).check(one.statement, limits).supported == one.true
        for one in planted
    ]


def chosen(planted: list[Planted], lexicon: Lexicon) -> Limits:
    """Of the limits with which both shares are at least `WANTED`, those that do best by the mean of the kinds, changed
    relations among them; if there are none, the best of the worse of both shares. What does not depend on the limits is
    found out once."""
    judged = [Source(one.cited.title, one.cited.text, lexicon).check(one.statement, Limits(0, 0)) for one in planted]

    def share(limits: Limits, kinds: Sequence[str]) -> float:
        own = [
            (verdict.supported and limits.allow(verdict)) == one.true
            for verdict, one in zip(judged, planted, strict=True)
            if one.kind in kinds
        ]
        return sum(own) / max(1, len(own))

    def worth(limits: Limits) -> tuple[float, float]:
        both = min(share(limits, TRUE), share(limits, FALSE))
        return min(both, WANTED), mean(limits, TRUE) + mean(limits, (*FALSE, *NOT_PROMISED))

    def mean(limits: Limits, kinds: Sequence[str]) -> float:
        return sum(share(limits, [kind]) for kind in kinds) / len(kinds)

    return max(GRID, key=worth)


def tally(right: list[bool], planted: list[Planted], kinds: object) -> tuple[float, float, float, int]:
    own = [fine for fine, one in zip(right, planted, strict=True) if one.kind in kinds]  # type: ignore[operator]
    low, high = wilson(sum(own), len(own))
    return sum(own) / max(1, len(own)), low, high, len(own)


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    if not count:
        return 0.0, 1.0
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def show(planted: list[Planted], lexicon: Lexicon, limits: Limits, count: int) -> None:
    for kind in (*TRUE, *FALSE):
        own = [one for one in planted if one.kind == kind]
        random.Random(0).shuffle(own)
        left = count
        for one in own:
            verdict = Source(one.cited.title, one.cited.text, lexicon).check(one.statement, limits)
            if verdict.supported != one.true and left:
                left -= 1
                quoted = " | ".join(one.cited.text[start:end] for start, end in verdict.spans)
                print(f"--- {kind}: {one.statement}\n    [{one.cited.title}] {quoted}")
                print(f"    {verdict.score:.2f} {verdict.words:.2f} {verdict.reasons}")


if __name__ == "__main__":
    main()
