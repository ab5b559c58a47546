"""How often a drafter's tokens are accepted: by its confidence, by their depth in the draft, and for each request."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from moesaic.serve.core.drafters import Draft
from moesaic.serve.core.request import Request

DECAY = 0.995  # of the counts over all requests, with every new draft token of a bin
REQUEST_DECAY = 0.95  # of one request: a text turns from copying to inventing within a sentence
PRIOR = 4.0  # draft tokens that the prior counts for
BINS = 10  # of confidence
MAX_DEPTH = 4  # deeper draft tokens share a bin
UNTRIED = 0.6  # acceptance rate of a drafter that was not tried yet
MAX_RATE = 0.98


@dataclass
class Tally:
    """Accepted and drafted tokens, the older ones counting less."""

    accepted: float = 0.0
    drafted: float = 0.0

    def count(self, accepted: float, drafted: float, decay: float) -> None:
        self.accepted = self.accepted * decay + accepted
        self.drafted = self.drafted * decay + drafted

    def rate(self, prior: float) -> float:
        return (self.accepted + PRIOR * prior) / (self.drafted + PRIOR)


class Acceptance:
    """The acceptance rates of one drafter."""

    def __init__(self) -> None:
        self.bins: defaultdict[tuple[int, int], Tally] = defaultdict(Tally)  # by depth and confidence
        self.depth: defaultdict[int, Tally] = defaultdict(Tally)
        self.request: defaultdict[int, Tally] = defaultdict(Tally)  # against what the bins predict

    def chance(self, request: Request, depth: int, confidence: float) -> float:
        """The probability that a draft token is accepted if its parent is, given its drafter's confidence."""
        return min(MAX_RATE, self._rate(depth, confidence) * self.request[request.number].rate(1.0))

    def expected(self, request: Request, depth: int) -> float:
        """The same before the drafter was asked."""
        rate = UNTRIED  # what is known of one depth is the prior of the next
        for above in range(min(depth, MAX_DEPTH) + 1):
            rate = self.depth[above].rate(rate)
        return min(MAX_RATE, rate * self.request[request.number].rate(1.0))

    def learn(self, request: Request, draft: Draft, accepted: list[int], finished: bool) -> None:
        """Every child of an accepted token was verified, and at most one of them accepted. Where the request has
        finished, the children of the last one were not."""
        depths = draft.depths()
        own = self.request[request.number]
        path = [-1, *accepted]
        for parent in path[:-1] if finished else path:
            children = [node for node, before in enumerate(draft.parents) if before == parent]
            for node in children:
                one = float(node in accepted)
                own.count(one, self._rate(depths[node], draft.confidence[node]), REQUEST_DECAY)
                self.bins[_bin(depths[node], draft.confidence[node])].count(one, 1.0, DECAY)
            if children:
                one = float(any(node in accepted for node in children))
                self.depth[min(depths[children[0]], MAX_DEPTH)].count(one, 1.0, DECAY)

    def _rate(self, depth: int, confidence: float) -> float:
        """What is known of draft tokens as confident at one depth is the prior of the next: else a drafter that is
        right and unsure would never be let go deep enough to show it."""
        rate = confidence
        for above in range(min(depth, MAX_DEPTH) + 1):
            rate = self.bins[_bin(above, confidence)].rate(rate)
        return rate

    def decay(self) -> None:
        """A forward went by without its draft tokens."""
        for tally in self.depth.values():
            tally.count(0.0, 0.0, DECAY)

    def forget(self, request: Request) -> None:
        self.request.pop(request.number, None)


def _bin(depth: int, confidence: float) -> tuple[int, int]:
    return min(depth, MAX_DEPTH), min(int(confidence * BINS), BINS - 1)
