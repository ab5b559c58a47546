"""What a pass takes with so many guesses in it, learnt from the passes there were."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

SAMPLES = 7  # passes of one size, the quickest of which is believed: whatever disturbs a pass makes it longer
FIRST = 2  # passes without guesses before there is one with any
TRIED = 0.05  # what a further guess is taken to cost, in passes, where none so many were ever tried
ROW = 0.01  # what a guess costs at the least, in tokens without: less than that is noise in the measurements
REFRESH = 64  # passes after which the cost of one without guesses is measured anew: contexts have grown since


class PassCost:
    """By number of requests and of guesses: a row more costs little on one machine, as much as a pass on another, and
    not the same for the second as for the tenth."""

    def __init__(self) -> None:
        self.samples: dict[int, dict[int, deque[float]]] = {}
        self.quickest: dict[int, dict[int, float]] = {}
        self.since: dict[int, int] = {}  # passes with guesses since the last one without
        self.ahead: dict[int, deque[float]] = {}  # steps without guesses, each queued before the last had ended

    def note(self, requests: int, guesses: int, seconds: float) -> None:
        size = _size(requests)
        samples = self.samples.setdefault(size, {}).setdefault(guesses, deque(maxlen=SAMPLES))
        samples.append(max(seconds, 1e-9))
        self.quickest.setdefault(size, {})[guesses] = min(samples)
        self.since[size] = self.since.get(size, 0) + 1 if guesses else 0

    def note_queued(self, requests: int, seconds: float) -> None:
        self.ahead.setdefault(_size(requests), deque(maxlen=SAMPLES)).append(max(seconds, 1e-9))

    def queued(self, requests: int) -> float | None:
        """Seconds of a step without guesses where it need not be waited for; None where that is not known."""
        samples = self.ahead.get(_size(requests), ())
        return median(samples) if len(samples) >= FIRST else None  # one that is short only ends what began before

    def plain(self, requests: int) -> float | None:
        """Seconds of a pass without guesses; None where it should be measured first."""
        size = _size(requests)
        if len(self.samples.get(size, {}).get(0, ())) < FIRST or self.since[size] >= REFRESH:
            return None
        return self.quickest[size][0]

    def tried(self, requests: int) -> int:
        """The most guesses there ever were in a pass of so many requests."""
        return max(self.quickest[_size(requests)])

    def at_worst(self, requests: int, guesses: int) -> float:
        """Passes that more guesses than ever may cost in addition: each as much as those that were tried, or, where
        none were, as a token without them."""
        slope = self._slope(requests) if self.tried(requests) else 1.0 / requests
        return guesses * max(0.0, slope)

    def seconds(self, requests: int, guesses: int) -> float:
        known = self.quickest[_size(requests)]
        return max(self._seconds(requests, guesses), known[0] * (1 + ROW * guesses / requests))

    def _seconds(self, requests: int, guesses: int) -> float:
        """On a line between the measured sizes next to it; cheap far beyond the largest, so that it is tried."""
        known = self.quickest[_size(requests)]
        sizes = sorted(known)
        above = bisect_left(sizes, guesses)
        if above < len(sizes):
            if sizes[above] == guesses:
                return known[guesses]
            low, high = sizes[above - 1], sizes[above]
            return known[low] + (known[high] - known[low]) * (guesses - low) / (high - low)
        largest = sizes[-1]
        if guesses > 1.5 * largest:  # better than its neighbour: a library may change its algorithm on the way
            return known[0] * (1 + max(TRIED, self._slope(requests) / 2) * guesses)
        return known[largest] * (requests + guesses) / (requests + largest)

    def _slope(self, requests: int) -> float:
        """Passes that each of the most guesses ever tried cost."""
        known, tried = self.quickest[_size(requests)], self.tried(requests)
        return (known[tried] / known[0] - 1.0) / tried if tried else 0.0


def _size(requests: int) -> int:
    """Passes of nearly as many requests are taken to be alike."""
    return requests if requests <= 8 else requests // (step := 1 << (requests.bit_length() - 3)) * step
