"""The what-if analysis on random jobs with a planted straggler: is the cause ranked first, and healed to the truth?

    python -m bench.plan_whatif                 200 jobs (some minutes)
    python -m bench.plan_whatif --first 1000    others

A job has 2 to 8 stages, 1 to 8 replicas, 4 to 32 micro-batches and 1 to 5 % of noise; the truth is the same job
made again without the plant. The generator (tests/plan/recorded_run.py) shares nothing with the analysis but the form
of a trace.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter

from bench.measure import record
from tests.plan.recorded_run import case
from tests.plan.test_straggler_causes import judge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=200)
    options = parser.parse_args()
    planted_of, hits, errors = Counter[str](), Counter[str](), []
    for seed in range(options.first, options.first + options.cases):
        planted = case(seed)
        hit, error, _ = judge(planted)
        planted_of[planted.cause] += 1
        hits[planted.cause] += hit
        errors += [error] if hit else []
    rows = [{"cause": cause, "planted": count, "ranked_first": hits[cause]} for cause, count in planted_of.items()]
    for row in rows:
        print(f"{row['cause']:28} ranked first in {row['ranked_first']} of {row['planted']}")
    median, worst = statistics.median(errors), max(errors)
    print(f"all: {hits.total()} of {options.cases} (goal 95 %)")
    print(f"healed time off by {median:.2%} (median), {worst:.2%} at worst (goal 3 %)")
    record("plan_whatif", rows, first=options.first, healed_median=median, healed_worst=worst)


if __name__ == "__main__":
    main()
