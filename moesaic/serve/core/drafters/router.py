"""SpecRouter: choose among drafters and chains of them, and how many tokens to draft, by measured acceptance and cost.

    moesaic serve DIR --drafter router draft_model=SMALLER_DIR
    moesaic serve DIR --drafter router draft_model=[SMALL_DIR,MIDDLE_DIR]     # the smallest first

Every drafter that offers itself for the model takes part. Before each forward, instant ones are asked, and the others
if their acceptance so far promises more than they cost. The draft tokens of all requests, likeliest first, then go into
the forward as long as they raise the expected tokens per second: each drafter's confidence is corrected by its
acceptance rate, and a forward costs what forwards of that size were measured to take. A balance of the time won and
lost ends drafting where the estimates are wrong, so that the worst case is a forward or two and one and a half per cent
of the time.

A draft model verifies drafts of the cheaper drafters before it, through a router of its own: so a chain (suffix, small
model, middle model, the model) is chosen link by link, for each request, by what each link was measured to take and to
accept, and "none" is among the choices everywhere. What the model sees of a chain is what its last link drafts alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
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
TIMES = 7  # drafts of which the median time counts
FIRST_TRIAL, LAST_TRIAL = 6, 384  # forwards after which a drafter that another one outdoes is tried again
TRIAL = 4  # forwards of a trial: a chain needs some to find out which of its own links pay
TRIAL_LENGTH = 6  # draft tokens of its forwards
UNHEARD = 1  # drafts in a row that were left out before some tokens of the next are verified all the same
HEARD = 2  # how many of them
TRIAL_BALANCE = 3.0  # forwards that must have been won, of which a trial may lose some


@dataclass(eq=False)
class _Candidate:
    """One drafter, with its acceptance rates and its cost."""

    drafter: Drafter
    acceptance: Acceptance = field(default_factory=Acceptance)
    times: deque[float] = field(default_factory=lambda: deque(maxlen=TIMES))  # seconds for one more draft token
    discount: float = 1.0
    rested: int = 0  # forwards since it was last asked
    patience: int = FIRST_TRIAL  # forwards after which it is tried although another one promises more
    trial: int = 0  # forwards for which it still is
    unheard: int = 0  # drafts in a row of which nothing was verified

    @property
    def seconds(self) -> float:
        """The usual time, or the last where that was shorter: one delay says nothing, and a longer draft that was
        cheaper by the token than all before says at once that long drafts are."""
        return self.discount * min(median(self.times), self.times[-1]) if self.times else 0.0

    def timed(self, seconds: float, draft_tokens: int) -> None:
        self.times.append(seconds / max(1, draft_tokens))
        self.discount, self.rested = 1.0, 0

    def rest(self) -> None:
        """Not asked this time. Texts change, and the first draft may have paid for a prefill: the measurements decay,
        and in time it is tried again."""
        self.discount *= 0.98
        self.rested += 1
        self.acceptance.decay()

    def due(self) -> bool:
        """Whether it is tried now. The longer others were better, the rarer that is."""
        if not self.trial and self.rested >= self.patience:
            self.trial, self.patience = TRIAL, min(2 * self.patience, LAST_TRIAL)
        return self.trial > 0


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
    draft_model: str | list[str] | None = None  # directories of smaller models, the smallest first
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
            paths = [self.draft_model] if isinstance(self.draft_model, str) else self.draft_model or []
            offered = [drafter for kind in classes(Drafter) for drafter in kind.offered(engine.model, paths)]
            # Later ones are asked only for what they add to earlier ones: cheap ones first, and those that observe
            # every forward in any case.
            self.drafters = tuple(sorted(offered, key=lambda one: (not one.instant, not one.needs_every_forward)))
        # A selection of tokens to attend to (DSA) would count the other branches of a tree. Between a draft token and
        # its parent, branches leave gaps, and sums over keys then round differently: not where bits must be the
        # trainer's. And a CPU runs fused layers where there are no branches, which saves more than branches win.
        on_cpu = engine.model.device.type == "cpu" and not self.always
        selects = getattr(engine.model.config.attention, "indexer", None) is not None
        invariant = engine.model.mode == "invariant"
        self.begin(engine.clock, only_lines=on_cpu or selects or invariant or not engine.runner.verifies_trees)
        for drafter in self.drafters:
            drafter.start(engine)
        for number, drafter in enumerate(self.drafters):
            drafter.stand_on([one for one in self.drafters[:number] if one.drafts_for_shadows], self.always)

    def begin(self, clock: Callable[[], float], only_lines: bool) -> None:
        """Nothing is measured yet. A router between two links of a chain begins only so: its drafters have started."""
        self.clock, self.only_lines = clock, only_lines
        self.candidates = [_Candidate(drafter) for drafter in self.drafters]
        self.cost = ForwardCost()
        self.balance = CREDIT  # of time won and lost, in forwards
        self.proposals: dict[int, _Proposal] = {}  # by request, for the forward in flight
        self.asked: set[int] = set()
        self.began = self.ended = 0.0
        self.previous: set[int] = set()  # the requests of the last forward
        self.instant_only = all(drafter.instant for drafter in self.drafters)
        self.accepted: Counter[str] = Counter()  # draft tokens, by the drafter's label

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        self.proposals, self.asked = {}, {request.number for request in requests}
        plain = self.cost.plain(len(requests))
        start = self.clock()
        if self.always or (plain is not None and self.balance > 0):
            for candidate in self.candidates:
                if candidate.drafter.instant or self.always:
                    self._ask(candidate, requests, limit)
            if not self.always and self._ask_slow(requests, limit):
                self._cut(requests)
        self.began = self.clock()
        if plain is not None and not self.instant_only:
            self.balance -= (self.began - start) / plain
        proposals = [self.proposals.get(request.number) for request in requests]
        return [proposal.draft if proposal is not None else Draft() for proposal in proposals]

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        self.learn(done)
        for drafter in self.drafters:
            drafter.observe(done, hidden_TD)

    def learn(self, done: Forward) -> None:
        """A forward has verified the drafts: what it took, and what it accepted."""
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
                self.accepted[proposal.candidate.drafter.label] += len(chunk.accepted)

    def rests(self, requests: int) -> bool:
        """Where there is more to lose than to win, and until it is known what a step without draft tokens costs."""
        if self.always or any(drafter.needs_every_forward for drafter in self.drafters):
            return False
        return self.balance <= 0 or self.cost.overlapped_seconds(requests) is None

    def rested(self, requests: int, seconds: float) -> None:
        self.cost.note_overlapped(requests, seconds)
        self.balance = min(MAX_BALANCE, self.balance + INTEREST)

    def finished(self, request: Request) -> None:
        self.forget(request)
        for drafter in self.drafters:
            drafter.finished(request)

    def forget(self, request: Request) -> None:
        self.proposals.pop(request.number, None)
        for candidate in self.candidates:
            candidate.acceptance.forget(request)

    def _ask_slow(self, requests: Sequence[Request], limit: int) -> bool:
        """Drafters that take their time: first the one that promises most, then others for what they still add. False
        where one is on trial: what it drafts is verified whole, so that there is something to learn."""
        left = [candidate for candidate in self.candidates if not candidate.drafter.instant]
        slow, tried = len(left), self._on_trial(left)
        if tried is not None:
            known = 2 * self.cost.tried(len(requests)) // len(requests)  # rows of which it is known what they cost
            self._ask(tried, requests, min(limit, tried.drafter.length, max(2, min(known, TRIAL_LENGTH))))
            left.remove(tried)
        while left and tried is None:
            plans = [(*self._plan(candidate, requests, limit), candidate) for candidate in left]
            _, length, asking, best = max(plans, key=lambda plan: plan[0])
            if not asking:
                break
            if len(left) == slow:  # it is the first choice: worth another trial soon, should that change
                best.patience = FIRST_TRIAL
            left.remove(best)
            self._ask(best, asking, length)
        for candidate in left:
            candidate.rest()
        return tried is None

    def _on_trial(self, slow: list[_Candidate]) -> _Candidate | None:
        """What a chain can do shows when it is asked a few times: those that lost so far have their turn."""
        if len(slow) < 2 or self.balance < TRIAL_BALANCE:
            return None
        tried = next((candidate for candidate in slow if candidate.due()), None)
        if tried is not None:
            tried.trial -= 1
        return tried

    def _ask(self, candidate: _Candidate, asking: Sequence[Request], limit: int) -> None:
        """Take a drafter's drafts for the requests that no other one serves better."""
        start = self.clock()
        drafts = candidate.drafter.draft(asking, limit)
        candidate.timed(self.clock() - start, limit)
        for request, draft in zip(asking, drafts, strict=True):
            draft = draft.best_line() if self.only_lines else draft
            proposal = _Proposal(candidate, draft, self._chances(candidate, request, draft))
            other = self.proposals.get(request.number)
            if len(draft) and (other is None or proposal.gain > other.gain):
                self.proposals[request.number] = proposal

    def _plan(self, candidate: _Candidate, requests: Sequence[Request], limit: int) -> tuple[float, int, list[Request]]:
        """The tokens per second that a drafter promises, how many tokens it should draft for that, and for whom;
        nobody, if it would not pay."""
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
        return best_rate, length, asking

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
        if not count and (unheard := self._unheard()):
            nodes, count = [node for node in nodes if self.proposals[node[1]].candidate in unheard], HEARD
        for proposal in self.proposals.values():
            proposal.candidate.unheard = 0 if count else proposal.candidate.unheard + 1
        kept: dict[int, list[int]] = {number: [] for number in self.proposals}
        # None is certain, so that a parent comes before its children.
        for _, number, node in sorted(nodes, key=lambda entry: -entry[0])[:count]:
            kept[number].append(node)
        for number, own in kept.items():
            self.proposals[number].draft = self.proposals[number].draft.keep(sorted(own))

    def _unheard(self) -> list[_Candidate]:
        """Drafters that are asked because they promise enough, and left out each time because they are unsure. Whether
        that says anything shows when a token is verified: one that is right and unsure was paid for and never heard."""
        candidates = [proposal.candidate for proposal in self.proposals.values()]
        return [one for one in candidates if not one.drafter.instant and one.unheard >= UNHEARD]

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
