"""Causes planted in runs that `recorded_run.py` made are ranked first, and healed to what the run would have been."""

from __future__ import annotations

from collections import Counter

from moesaic.plan.whatif.analysis import Cause, analyse
from tests.plan.recorded_run import CAUSES, Case, case

CASES = 40  # bench/plan_whatif.py plays 200


def found(cause: Cause, planted: Case) -> bool:
    """The kind and the place; of pauses, which come on many ranks, four of five of them, and few others."""
    if cause.cause != planted.cause:
        return False
    if cause.cause == "garbage-collection pauses":
        named, meant = set(cause.place["ranks"]), set(planted.place["ranks"])
        return len(named & meant) >= 0.8 * len(named | meant)
    return all(cause.place.get(name) == value for name, value in planted.place.items())


def judge(planted: Case) -> tuple[bool, float, float]:
    """Whether the planted cause is ranked first, how far the healed time is from the truth, and the replay's error."""
    result = analyse(planted.trace)
    if not result.causes or not found(result.causes[0], planted):
        return False, 1.0, result.replay_error
    return True, abs(result.causes[0].healed_seconds / planted.truth - 1), result.replay_error


def test_planted_causes_are_ranked_first() -> None:
    """In random jobs: the cause in at least 95 %, and the time without it within 3 % in at least 95 %."""
    hits: Counter[str] = Counter()
    near = 0
    for seed in range(CASES):
        planted = case(seed)
        hit, error, replay_error = judge(planted)
        assert replay_error < (0.005 if planted.job.skew else 1e-9)
        hits[planted.cause] += hit
        near += hit and error <= 0.03
    assert hits.total() >= 0.95 * CASES
    assert min(hits[cause] for cause in CAUSES) >= 0.9 * CASES / len(CAUSES)
    assert near >= 0.95 * CASES
