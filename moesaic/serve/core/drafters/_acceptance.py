"""How often a drafter's guesses hold: by what it says of them, by how far ahead they are, and for each request."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from moesaic.serve.core.drafters import Draft
from moesaic.serve.core.request import Request

FADE = 0.995  # of what is known of all requests, with every new guess of its kind
QUICK_FADE = 0.95  # of one request: a text turns from copying to inventing within a sentence
PRIOR = 4.0  # guesses' worth of belief in what is known before any of a kind was tried
STEPS = 10  # kinds of odds
FAR = 4  # guesses further ahead count as one kind
HOPE = 0.6  # that a guess of an untried drafter holds
SURE = 0.98  # nothing is surer


@dataclass
class Tally:
    held: float = 0.0
    tried: float = 0.0

    def count(self, held: float, tried: float, fade: float) -> None:
        self.held = self.held * fade + held
        self.tried = self.tried * fade + tried

    def chunk(self, prior: float) -> float:
        return (self.held + PRIOR * prior) / (self.tried + PRIOR)


class Acceptance:
    """Of one drafter."""

    def __init__(self) -> None:
        self.said: defaultdict[tuple[int, int], Tally] = defaultdict(Tally)  # by depth and by the drafter's odds
        self.depth: defaultdict[int, Tally] = defaultdict(Tally)
        self.request: defaultdict[int, Tally] = defaultdict(Tally)  # `tried` counts what should have held

    def chance(self, request: Request, depth: int, odds: float) -> float:
        """That a guess holds if the one before it does, given the odds its drafter gave it."""
        chunk = self.said[_kind(depth, odds)].chunk(odds)
        return min(SURE, chunk * self.request[request.number].chunk(1.0))

    def hope(self, request: Request, depth: int) -> float:
        """The same before the drafter was asked."""
        return min(SURE, self.depth[min(depth, FAR)].chunk(HOPE) * self.request[request.number].chunk(1.0))

    def learn(self, request: Request, draft: Draft, accepted: list[int], finished: bool) -> None:
        """Every child of a guess that held was tried, and at most one held. Where the request has ended, nobody knows
        of the last children."""
        depths = draft.depths()
        own = self.request[request.number]
        path = [-1, *accepted]
        for parent in path[:-1] if finished else path:
            children = [node for node, before in enumerate(draft.parents) if before == parent]
            for node in children:
                kind, held = _kind(depths[node], draft.odds[node]), float(node in accepted)
                own.count(held, self.said[kind].chunk(draft.odds[node]), QUICK_FADE)
                self.said[kind].count(held, 1.0, FADE)
            if children:
                held = float(any(node in accepted for node in children))
                self.depth[min(depths[children[0]], FAR)].count(held, 1.0, FADE)

    def fade(self) -> None:
        """A pass went by without its guesses."""
        for tally in self.depth.values():
            tally.count(0.0, 0.0, FADE)

    def forget(self, request: Request) -> None:
        self.request.pop(request.number, None)


def _kind(depth: int, odds: float) -> tuple[int, int]:
    return min(depth, FAR), min(int(odds * STEPS), STEPS - 1)
