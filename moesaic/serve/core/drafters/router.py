"""SpecRouter: choose among drafters, and the number of draft tokens, by their measured acceptance and cost.

    moesaic serve DIR --drafter router draft_model=SMALLER_DIR

Every drafter that offers itself for the model takes part. Before each forward, instant ones are asked, and the others
if their acceptance so far promises more than they cost. The draft tokens of all requests, likeliest first, then go into
the forward as long as they raise the expected tokens per second: each drafter's confidence is corrected by its
acceptance rate, and a forward costs what forwards of that size were measured to take. A balance of the time won and
lost ends drafting where the estimates are wrong, so that the worst case is a forward or two and one and a half per cent
of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.methods import classes
from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.drafters._acceptance import Acceptance
from moesaic.serve.core.drafters._cost import ForwardCost
from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward

CREDIT = 1.5  # forwards that may be lost to drafting before it has won any
INTEREST = 0.015  # of all time that may be lost to it in the long run
MAX_BALANCE = 12.0  # forwards: as much as may be lost again of what was won
NEGLIGIBLE = 0.05  # a probability to be reached below which longer drafts are not considered
MIN_GAIN = 1.05  # the gain in throughput below which draft tokens are left out


@dataclass
class _Candidate:
    """One drafter, with its acceptance rates and its cost."""

    drafter: Drafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    seconds: float = 0.0  # for one more draft token

    def timed(self, seconds: float, draft_tokens: int) -> None:
        each = seconds / max(1, draft_tokens)
        self.seconds = 0.8 * self.seconds + 0.2 * each if self.seconds else each

    def rest(self) -> None:
        """Not asked this time. Texts change, and the first draft may have paid for a prefill: the measurements decay,
        and in time it is tried again."""
        self.seconds *= 0.98
        self.acceptance.decay()


@dataclass
class _Proposal:
    """One drafter's draft for one request, and how likely each of its tokens is accepted."""

    candidate: _Candidate
    draft: Draft
    chances: list[float]

    @property
    def gain(self) -> float:
        """Expected accepted tokens."""
        return sum(self.chances)


@dataclass(eq=False)
class DraftRouter(Drafter):
    draft_model: str | None = None
    always: bool = False  # as many draft tokens as allowed, whether they pay or not
    drafters: tuple[Drafter, ...] = field(default=(), init=False)

    @classmethod
    def over(cls, *drafters: Drafter, always: bool = False) -> DraftRouter:
        """A router over these drafters only."""
        router = cls(always=always)
        router.drafters = drafters
        return router

    def start(self, engine: Engine) -> None:
        if not self.drafters:
            offered = [
                drafter for kind in classes(Drafter) if (drafter := kind.offered(engine.model, self.draft_model))
            ]
            # Later ones are asked only for what they add to earlier ones: cheap ones first, and those that observe
            # every forward in any case.
            self.drafters = tuple(sorted(offered, key=lambda one: (not one.instant, not one.needs_every_forward)))
        self.clock = engine.clock
        # A selection of tokens to attend to (DSA) would count the other branches of a tree. Between a draft token and
        # its parent, branches leave gaps, and sums over keys then round differently: not where bits must be the
        # trainer's. And a CPU runs fused layers where there are no branches, which saves more than branches win.
        on_cpu = engine.model.device.type == "cpu" and not self.always
        selects = getattr(engine.model.config.attention, "indexer", None) is not None
        self.only_lines = on_cpu or selects or engine.model.mode == "invariant" or not engine.runner.verifies_trees
        self.candidates = [_Candidate(drafter) for drafter in self.drafters]
        self.cost = ForwardCost()
        self.balance = CREDIT  # of time won and lost, in forwards
        self.proposals: dict[int, _Proposal] = {}  # by request, for the forward in flight
        self.asked: set[int] = set()
        self.began = self.ended = 0.0
        self.previous: set[int] = set()  # the requests of the last forward
        self.instant_only = all(drafter.instant for drafter in self.drafters)
        for drafter in self.drafters:
            drafter.start(engine)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        self.proposals, self.asked = {}, {request.number for request in requests}
        plain = self.cost.plain(len(requests))
        start = self.clock()
        if self.always or (plain is not None and self.balance > 0):
            for candidate in self.candidates:
                self._ask(candidate, requests, limit)
            if not self.always:
                self._cut(requests)
        self.began = self.clock()
        if plain is not None and not self.instant_only:
            self.balance -= (self.began - start) / plain
        proposals = [self.proposals.get(request.number) for request in requests]
        return [proposal.draft if proposal is not None else Draft() for proposal in proposals]

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        now, numbers = self.clock(), {chunk.request.number for chunk in done.chunks}
        # Instant drafting is part of a forward, as is all else between two forwards for the same requests.
        since = self.ended if self.instant_only and numbers == self.previous else self.began
        self.previous, self.ended = numbers, now
        self._update_balance(done, now - since)
        for chunk in done.chunks:
            proposal = self.proposals.pop(chunk.request.number, None)
            if proposal is not None and chunk.draft is not None:
                ended = chunk.request.finish_reason is not None
                proposal.candidate.acceptance.learn(chunk.request, chunk.draft, chunk.accepted, ended)
        for drafter in self.drafters:
            drafter.observe(done, hidden_TD)

    def rests(self, requests: int) -> bool:
        """Where there is more to lose than to win, and until it is known what a step without draft tokens costs."""
        if self.always or any(drafter.needs_every_forward for drafter in self.drafters):
            return False
        return self.balance <= 0 or self.cost.overlapped_seconds(requests) is None

    def rested(self, requests: int, seconds: float) -> None:
        self.cost.note_overlapped(requests, seconds)
        self.balance = min(MAX_BALANCE, self.balance + INTEREST)

    def finished(self, request: Request) -> None:
        self.proposals.pop(request.number, None)
        for candidate in self.candidates:
            candidate.acceptance.forget(request)
            candidate.drafter.finished(request)

    def _ask(self, candidate: _Candidate, requests: Sequence[Request], limit: int) -> None:
        """Take a drafter's drafts for the requests that no other one serves better."""
        asking = list(requests)
        if not candidate.drafter.instant and not self.always:
            limit, asking = self._length(candidate, requests, limit)
        if not asking:
            candidate.rest()
            return
        start = self.clock()
        drafts = candidate.drafter.draft(asking, limit)
        candidate.timed(self.clock() - start, limit)
        for request, draft in zip(asking, drafts, strict=True):
            draft = draft.best_line() if self.only_lines else draft
            proposal = _Proposal(candidate, draft, self._chances(candidate, request, draft))
            other = self.proposals.get(request.number)
            if len(draft) and (other is None or proposal.gain > other.gain):
                self.proposals[request.number] = proposal

    def _length(self, candidate: _Candidate, requests: Sequence[Request], limit: int) -> tuple[int, list[Request]]:
        """How many tokens a drafter that takes its time should draft, and for whom; nobody, if it would not pay."""
        proposed = {number: proposal.gain for number, proposal in self.proposals.items()}
        expected: dict[int, list[float]] = {request.number: [] for request in requests}
        best_rate, _ = self._best(requests, [one for proposal in self.proposals.values() for one in proposal.chances])
        length, asking = 0, list[Request]()
        for tokens in range(1, min(limit, candidate.drafter.length) + 1):
            for request in requests:
                own = expected[request.number]
                reached = own[-1] if own else 1.0
                own.append(reached * candidate.acceptance.expected(request, tokens - 1))
            better = [one for one in requests if sum(expected[one.number]) > proposed.get(one.number, 0.0)]
            served = {request.number for request in better}
            chances = [chance for request in better for chance in expected[request.number]]
            for number, proposal in self.proposals.items():
                chances += proposal.chances if number not in served else []
            rate, _ = self._best(requests, chances, tokens * candidate.seconds)
            if better and rate > best_rate * MIN_GAIN:
                best_rate, length, asking = rate, tokens, better
            if max(own[-1] for own in expected.values()) < NEGLIGIBLE:
                break
        return length, asking

    def _chances(self, candidate: _Candidate, request: Request, draft: Draft) -> list[float]:
        """Of every draft token: the probability that it is accepted, and all before it."""
        chances: list[float] = []
        for parent, confidence, depth in zip(draft.parents, draft.confidence, draft.depths()):
            before = chances[parent] if parent >= 0 else 1.0
            chances.append(before * candidate.acceptance.chance(request, depth, confidence))
        return chances

    def _best(self, requests: Sequence[Request], chances: Sequence[float], spent: float = 0.0) -> tuple[float, int]:
        """The highest expected tokens per second, and how many draft tokens give it, taken in order of their chances.
        `spent` is the time that drafting takes."""
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
            if rate > best_rate * (1.0 if best else MIN_GAIN):
                best_rate, best = rate, count
        return best_rate, best

    def _cut(self, requests: Sequence[Request]) -> None:
        """Keep the draft tokens that raise the expected tokens per second."""
        nodes = [
            (chance, number, node)
            for number, proposal in self.proposals.items()
            for node, chance in enumerate(proposal.chances)
        ]
        _, count = self._best(requests, [chance for chance, _, _ in nodes])
        kept: dict[int, list[int]] = {number: [] for number in self.proposals}
        # None is certain, so that a parent comes before its children.
        for _, number, node in sorted(nodes, key=lambda entry: -entry[0])[:count]:
            kept[number].append(node)
        for number, own in kept.items():
            self.proposals[number].draft = self.proposals[number].draft.keep(sorted(own))

    def _update_balance(self, done: Forward, seconds: float) -> None:
        """Measure a forward, if it did nothing but decode the requests that were asked for."""
        numbers = {chunk.request.number for chunk in done.chunks}
        if numbers != self.asked or any(chunk.tokens != 1 for chunk in done.chunks) or not done.usual:
            return
        requests, draft_tokens = len(done.chunks), sum(len(chunk.draft or ()) for chunk in done.chunks)
        self.cost.note(requests, draft_tokens, seconds)
        if (plain := self.cost.plain(requests)) is not None:
            without = min(plain, self.cost.overlapped_seconds(requests) or plain)
            forwards = self.cost.seconds(requests, draft_tokens) / without
            won = sum(len(chunk.accepted) for chunk in done.chunks) / requests - (forwards - 1.0)
            # Debts have a floor: what failed while there was little to draft from may succeed in the next epoch, and a
            # forward that something else delayed says nothing at all.
            self.balance = max(-CREDIT, min(MAX_BALANCE, self.balance + won + INTEREST * forwards))
