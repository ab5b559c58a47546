"""SpecRouter: choose among drafters, and how many guesses to make, from what they were measured to gain and to cost.

    moesaic serve DIR --drafter router draft_model=SMALLER_DIR

All drafters there are take part: the suffix trees, the model's own prediction layers if it has any, and a smaller model
if one is named. Before each pass, instant ones are asked, and the others if what they gained so far promises more than
they cost. The guesses of all requests, likeliest first, then go into the pass as long as they raise the expected tokens
per second: each drafter's odds are corrected by how often such guesses held, and a pass costs what passes of that size
were measured to take. An account of the time won and lost ends drafting where the estimates are wrong, so that the
worst case is a pass or two and one and a half per cent of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.drafters._acceptance import Acceptance
from moesaic.serve.core.drafters._cost import PassCost
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.mtp import PredictionLayers
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward

CREDIT = 1.5  # passes that may be lost to drafting before it has won any
INTEREST = 0.015  # of all time that may be lost to it in the long run
SAVINGS = 12.0  # passes: as much as may be lost again of what was won
FAINT = 0.05  # a chance to be reached that is not worth thinking further than
WORTH = 1.05  # the gain in speed below which guesses are left out


@dataclass
class _Drafting:
    """One drafter, and what is known of it."""

    drafter: Drafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: float = 0.0  # for one guess further

    def timed(self, seconds: float, guesses: int) -> None:
        each = seconds / max(1, guesses)
        self.seconds = 0.8 * self.seconds + 0.2 * each if self.seconds else each

    def rest(self) -> None:
        """Not asked this time. Texts change, and the first draft may have taken long to read a prompt: in time, what
        is known fades, and it is tried again."""
        self.seconds *= 0.98
        self.acceptance.fade()


@dataclass
class _Bid:
    """What one drafter guesses for one request, and how likely each guess is to be reached and to hold."""

    drafting: _Drafting
    draft: Draft
    chances: list[float]

    @property
    def gain(self) -> float:
        """Tokens it should be worth."""
        return sum(self.chances)


@dataclass(eq=False)
class DraftRouter(Drafter):
    draft_model: str | None = None
    always: bool = False  # as many guesses as allowed, whether they pay or not
    drafters: tuple[Drafter, ...] = field(default=(), init=False)

    @classmethod
    def over(cls, *drafters: Drafter, always: bool = False) -> DraftRouter:
        """A router over these drafters only."""
        router = cls(always=always)
        router.drafters = drafters
        return router

    def start(self, engine: Engine) -> None:
        if not self.drafters:
            own = (PredictionLayers(),) if len(engine.model.mtp) else ()
            smaller = (DraftModel(self.draft_model),) if self.draft_model is not None else ()
            self.drafters = (Suffix(), *own, *smaller)
        self.clock = engine.clock
        # A selection of tokens to attend to (DSA) would count the other branches of a tree. Between a guess and what it
        # follows, branches leave gaps, and sums over keys then round differently: not where bits must be the trainer's.
        # And a CPU runs whole layers as one piece where there are no branches, which saves more than branches win.
        # A GPU's graphs take lines only.
        on_cpu = engine.model.device.type == "cpu" and not self.always
        selects = getattr(engine.model.config.attention, "indexer", None) is not None
        self.only_lines = on_cpu or selects or engine.model.mode == "invariant" or not engine.runner.verifies_trees
        self.draftings = [_Drafting(drafter) for drafter in self.drafters]
        self.cost = PassCost()
        self.balance = CREDIT  # of time won and lost, in passes
        self.bids: dict[int, _Bid] = {}  # by request, for the pass under way
        self.asked: set[int] = set()
        self.began = self.ended = 0.0
        self.before: set[int] = set()  # the requests of the last pass
        self.instant_only = all(drafter.instant for drafter in self.drafters)
        for drafter in self.drafters:
            drafter.start(engine)

    def draft(self, requests: Sequence[Request], most: int) -> list[Draft]:
        self.bids, self.asked = {}, {request.number for request in requests}
        plain = self.cost.plain(len(requests))
        began = self.clock()
        if self.always or (plain is not None and self.balance > 0):
            for drafting in self.draftings:
                self._ask(drafting, requests, most)
            if not self.always:
                self._cut(requests)
        self.began = self.clock()
        if plain is not None and not self.instant_only:
            self.balance -= (self.began - began) / plain
        return [self.bids[request.number].draft if request.number in self.bids else Draft() for request in requests]

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        now, numbers = self.clock(), {chunk.request.number for chunk in done.chunks}
        # Instant guesses are part of a pass, as is all else between two passes for the same requests.
        since = self.ended if self.instant_only and numbers == self.before else self.began
        self.before, self.ended = numbers, now
        self._book(done, now - since)
        for chunk in done.chunks:
            bid = self.bids.pop(chunk.request.number, None)
            if bid is not None and chunk.draft is not None:
                ended = chunk.request.finish_reason is not None
                bid.drafting.acceptance.learn(chunk.request, chunk.draft, chunk.accepted, ended)
        for drafter in self.drafters:
            drafter.observe(done, hidden_TD)

    def rests(self, requests: int) -> bool:
        """Where there is more to lose than to win, and until it is known what a step without guesses costs."""
        if self.always or any(drafter.watches for drafter in self.drafters):
            return False
        return self.balance <= 0 or self.cost.queued(requests) is None

    def rested(self, requests: int, seconds: float) -> None:
        self.cost.note_queued(requests, seconds)
        self.balance = min(SAVINGS, self.balance + INTEREST)

    def finished(self, request: Request) -> None:
        self.bids.pop(request.number, None)
        for drafting in self.draftings:
            drafting.acceptance.forget(request)
            drafting.drafter.finished(request)

    def _ask(self, drafting: _Drafting, requests: Sequence[Request], most: int) -> None:
        """Take a drafter's guesses for the requests that no other one serves better."""
        asking = list(requests)
        if not drafting.drafter.instant and not self.always:
            most, asking = self._length(drafting, requests, most)
        if not asking:
            drafting.rest()
            return
        began = self.clock()
        drafts = drafting.drafter.draft(asking, most)
        drafting.timed(self.clock() - began, most)
        for request, draft in zip(asking, drafts, strict=True):
            draft = draft.best_line() if self.only_lines else draft
            bid = _Bid(drafting, draft, self._chances(drafting, request, draft))
            if len(draft) and (request.number not in self.bids or bid.gain > self.bids[request.number].gain):
                self.bids[request.number] = bid

    def _length(self, drafting: _Drafting, requests: Sequence[Request], most: int) -> tuple[int, list[Request]]:
        """How many guesses a drafter that takes its time should make, and for whom; nobody, if it would not pay."""
        sure = {request.number: self.bids[request.number].gain for request in requests if request.number in self.bids}
        hopes: dict[int, list[float]] = {request.number: [] for request in requests}
        best_rate, _ = self._best(requests, [chance for bid in self.bids.values() for chance in bid.chances])
        length, asking = 0, list[Request]()
        for guesses in range(1, min(most, drafting.drafter.length) + 1):
            for request in requests:
                hope = hopes[request.number]
                reached = hope[-1] if hope else 1.0
                hope.append(reached * drafting.acceptance.hope(request, guesses - 1))
            better = [request for request in requests if sum(hopes[request.number]) > sure.get(request.number, 0.0)]
            served = {request.number for request in better}
            chances = [chance for request in better for chance in hopes[request.number]]
            chances += [chance for number, bid in self.bids.items() if number not in served for chance in bid.chances]
            rate, _ = self._best(requests, chances, guesses * drafting.seconds)
            if better and rate > best_rate * WORTH:
                best_rate, length, asking = rate, guesses, better
            if max(hope[-1] for hope in hopes.values()) < FAINT:
                break
        return length, asking

    def _chances(self, drafting: _Drafting, request: Request, draft: Draft) -> list[float]:
        """Of every guess, that it is reached and holds."""
        chances: list[float] = []
        for parent, odds, depth in zip(draft.parents, draft.odds, draft.depths()):
            before = chances[parent] if parent >= 0 else 1.0
            chances.append(before * drafting.acceptance.chance(request, depth, odds))
        return chances

    def _best(self, requests: Sequence[Request], chances: Sequence[float], spent: float = 0.0) -> tuple[float, int]:
        """The most expected tokens per second, and how many guesses give it, taken in order of their chances. `spent`
        is the time that drafting takes."""
        tokens = float(len(requests))
        best_rate, best = tokens / (self.cost.seconds(len(requests), 0) + spent), 0
        tried = self.cost.tried(len(requests))
        for count, chance in enumerate(sorted(chances, reverse=True)[: 2 * tried + 4], 1):
            tokens += chance
            if count > tried:  # first earn what it may lose, should half of what is expected come true
                gain = 0.5 * (tokens / len(requests) - 1.0)
                if self.cost.at_worst(len(requests), count) - gain > self.balance:
                    break
            rate = tokens / (self.cost.seconds(len(requests), count) + spent)
            if rate > best_rate * (1.0 if best else WORTH):
                best_rate, best = rate, count
        return best_rate, best

    def _cut(self, requests: Sequence[Request]) -> None:
        """Keep the guesses that raise the expected tokens per second."""
        guesses = [
            (chance, number, node) for number, bid in self.bids.items() for node, chance in enumerate(bid.chances)
        ]
        _, count = self._best(requests, [chance for chance, _, _ in guesses])
        kept: dict[int, list[int]] = {number: [] for number in self.bids}
        # None is certain, so that a parent comes before its children.
        for _, number, node in sorted(guesses, key=lambda guess: -guess[0])[:count]:
            kept[number].append(node)
        for number, nodes in kept.items():
            self.bids[number].draft = self.bids[number].draft.keep(sorted(nodes))

    def _book(self, done: Forward, seconds: float) -> None:
        """Note what a pass took and won, if it did nothing but go on with the answers it was asked about."""
        numbers = {chunk.request.number for chunk in done.chunks}
        if numbers != self.asked or any(chunk.tokens != 1 for chunk in done.chunks) or not done.usual:
            return
        requests, guesses = len(done.chunks), sum(len(chunk.draft or ()) for chunk in done.chunks)
        self.cost.note(requests, guesses, seconds)
        if (plain := self.cost.plain(requests)) is not None:
            passes = self.cost.seconds(requests, guesses) / min(plain, self.cost.queued(requests) or plain)
            won = sum(len(chunk.accepted) for chunk in done.chunks) / requests - (passes - 1.0)
            # Debts have a floor: what failed while there was little to guess from may hold in the next epoch, and a
            # pass that something else delayed says nothing at all.
            self.balance = max(-CREDIT, min(SAVINGS, self.balance + won + INTEREST * passes))
