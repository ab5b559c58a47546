"""How long a forward takes with so many draft tokens in it, learned from the forwards so far."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

SAMPLES = 7  # forwards of one size, of which the shortest counts: whatever disturbs a forward makes it longer
WARMUP = 2  # forwards without draft tokens before there is one with any
UNTRIED = 0.05  # cost of one more draft token, in forwards, where so many were never tried
MIN_ROW = 0.01  # min cost of a draft token, in tokens without: less than that is noise in the measurements
REFRESH = 64  # forwards after which the cost of one without draft tokens is measured again: contexts have grown since


class ForwardCost:
    """By number of requests and of draft tokens: one more row costs little on one machine, as much as a forward on
    another, and the second not the same as the tenth."""

    def __init__(self) -> None:
        self.samples: dict[int, dict[int, deque[float]]] = {}
        self.fastest: dict[int, dict[int, float]] = {}
        self.since: dict[int, int] = {}  # forwards with draft tokens since the last one without
        self.overlapped: dict[int, deque[float]] = {}  # steps launched before the last had ended

    def note(self, requests: int, draft_tokens: int, seconds: float) -> None:
        size = _size(requests)
        samples = self.samples.setdefault(size, {}).setdefault(draft_tokens, deque(maxlen=SAMPLES))
        samples.append(max(seconds, 1e-9))
        self.fastest.setdefault(size, {})[draft_tokens] = min(samples)
        self.since[size] = self.since.get(size, 0) + 1 if draft_tokens else 0

    def note_overlapped(self, requests: int, seconds: float) -> None:
        self.overlapped.setdefault(_size(requests), deque(maxlen=SAMPLES)).append(max(seconds, 1e-9))

    def overlapped_seconds(self, requests: int) -> float | None:
        """Seconds of a step without draft tokens where steps overlap; None where that is not known."""
        samples = self.overlapped.get(_size(requests), ())
        return median(samples) if len(samples) >= WARMUP else None  # one that is short only ends what began before

    def plain(self, requests: int) -> float | None:
        """Seconds of a forward without draft tokens; None where it should be measured first."""
        size = _size(requests)
        if len(self.samples.get(size, {}).get(0, ())) < WARMUP or self.since[size] >= REFRESH:
            return None
        return self.fastest[size][0]

    def tried(self, requests: int) -> int:
        """The most draft tokens there ever were in a forward of so many requests."""
        return max(self.fastest[_size(requests)])

    def at_worst(self, requests: int, draft_tokens: int) -> float:
        """Forwards that more draft tokens than ever may cost in addition: each as much as those that were tried, or,
        where none were, as a token without them."""
        slope = self._slope(requests) if self.tried(requests) else 1.0 / requests
        return draft_tokens * max(0.0, slope)

    def seconds(self, requests: int, draft_tokens: int) -> float:
        known = self.fastest[_size(requests)]
        return max(self._seconds(requests, draft_tokens), known[0] * (1 + MIN_ROW * draft_tokens / requests))

    def _seconds(self, requests: int, draft_tokens: int) -> float:
        """On a line between the measured sizes next to it; cheap far beyond the largest, so that it is tried."""
        known = self.fastest[_size(requests)]
        sizes = sorted(known)
        above = bisect_left(sizes, draft_tokens)
        if above < len(sizes):
            if sizes[above] == draft_tokens:
                return known[draft_tokens]
            low, high = sizes[above - 1], sizes[above]
            return known[low] + (known[high] - known[low]) * (draft_tokens - low) / (high - low)
        largest = sizes[-1]
        if draft_tokens > 1.5 * largest:  # better than its neighbour: a library may change its algorithm on the way
            return known[0] * (1 + max(UNTRIED, self._slope(requests) / 2) * draft_tokens)
        return known[largest] * (requests + draft_tokens) / (requests + largest)

    def _slope(self, requests: int) -> float:
        """Forwards that each of the most draft tokens ever tried cost."""
        known, tried = self.fastest[_size(requests)], self.tried(requests)
        return (known[tried] / known[0] - 1.0) / tried if tried else 0.0


def _size(requests: int) -> int:
    """Forwards of nearly as many requests are taken to be alike."""
    return requests if requests <= 8 else requests // (step := 1 << (requests.bit_length() - 3)) * step
