"""Beam search: of all continuations of a prompt, the likeliest few are followed at every step, instead of one drawn.

    for beam in beam_search(engine, prompt, BeamOptions(width=4), Sampling(max_tokens=20)): beam.text, beam.score

As in `transformers`: a beam's score is its cumulative log-probability divided by its number of tokens to the power of
`length_penalty`; beams that end are kept while others go on, until none of these could be better (`early_stopping`
False), as soon as `width` have ended (True), or until none could be even at the greatest length ("never").

Every step of every beam is a request of its own for one token, so that beams share the pages of their common prefix,
and are batched, preempted and moved like anything else; `BeamSearch` says which requests come next. Nothing is drawn:
bias, penalties and words that must not come count, temperature and cuts do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from moesaic.errors import UserError
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampling import Sampling
from moesaic.serve.core.sequence_states import refuse_request
from moesaic.serve.core.text import TextStream

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine

MAX_REPORTED = 100  # tokens in the place of one, of which the next beams are made
TOKENS_PER_CHARACTER = 4  # at most: its bytes


@dataclass(frozen=True)
class BeamOptions:
    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True)
class Beam:
    tokens: tuple[int, ...] = ()
    logprob: float = 0.0  # cumulative
    entries: tuple[TokenLogprob, ...] = ()  # one for each token
    ended: bool = False  # by a stop token or a stop string

    def then(self, token: int, logprob: float, among: TokenLogprob, ended: bool) -> Beam:
        rank = next(rank for rank, (other, _) in enumerate(among.top, 1) if other == token)
        entry = TokenLogprob(token, logprob, among.top, rank=rank)
        return Beam((*self.tokens, token), self.logprob + logprob, (*self.entries, entry), ended)


@dataclass(frozen=True)
class FinishedBeam:
    beam: Beam
    score: float
    text: str
    finish_reason: str  # stop, length
    stop_reason: str | int | None


class BeamSearch:
    """Beams of one prompt. `requests` are those of the next step; when they are done, `advance`; until `done`."""

    def __init__(self, engine: Engine, root: Request, options: BeamOptions) -> None:
        """`root` is the request whose completions are asked for; it is not submitted itself."""
        self.engine, self.options, self.root = engine, options, root
        sampling = root.sampling
        self.step_sampling = _for_a_step(engine, sampling, options)
        self.most = root.limit - len(root.prompt)
        self.live = [Beam()]
        self.finished: list[tuple[float, Beam]] = []  # best first
        self.done = False
        own = () if sampling.ignore_eos else engine.stop_tokens
        self.stop_tokens = {*own, *sampling.stop_tokens}
        self.stop = sampling.stop

    def requests(self) -> list[Request]:
        """One for each live beam: its tokens are written, as after a preemption, and the next is to come."""
        made = []
        for beam in self.live:
            request = Request(
                self.root.prompt,
                self.step_sampling,
                priority=self.root.priority,
                deadline=self.root.deadline,
                salt=self.root.salt,
                adapter=self.root.adapter,
                arrived=self.root.arrived,  # it has waited once
                is_step=True,
            )
            request.breakers = self.root.breakers
            request.tokens += beam.tokens
            request.limit = len(request.tokens) + 1
            made.append(request)
        return made

    def advance(self, found: Sequence[TokenLogprob]) -> None:
        """`found` is what came in the place of each live beam's next token."""
        width, length = self.options.width, len(self.live[0].tokens) + 1
        nexts = [
            (beam.logprob + logprob, -number, token, logprob, beam, among)
            for number, (beam, among) in enumerate(zip(self.live, found, strict=True))
            for token, logprob in among.top
            if logprob > float("-inf")
        ]
        nexts.sort(key=lambda one: one[:3], reverse=True)
        last = length >= self.most
        self.live = []
        for rank, (_, _, token, logprob, beam, among) in enumerate(nexts):
            longer = beam.then(token, logprob, among, self._ends(beam, token))
            if longer.ended or last:
                if rank < width:  # the others are there only so that enough go on
                    self._finish(longer)
            else:
                self.live.append(longer)
            if len(self.live) == width or (last and rank + 1 >= width):
                break
        self.done = not self.live or self._settled(length)

    def _ends(self, beam: Beam, token: int) -> bool:
        if token in self.stop_tokens:
            return True
        if not self.stop or len(beam.tokens) < self.root.sampling.min_tokens:
            return False
        # A live beam has none so far: one that this token completes stands in the last few.
        tokens = (*beam.tokens, token)
        last = max(0, len(tokens) - TOKENS_PER_CHARACTER * max(map(len, self.stop)) - 1)
        return self._read(tokens[last:], tokens[:last], 0)[1].stopped is not None

    def _read(self, tokens: Sequence[int], before: Sequence[int], min_tokens: int) -> tuple[str, TextStream]:
        """The text of some of a beam's tokens, up to a stop string."""
        assert self.engine.tokenizer is not None, "a model without a tokenizer takes no stop strings"
        stream = TextStream(self.engine.tokenizer, before or self.root.prompt, self.stop, min_tokens)
        return "".join([stream.push(token) for token in tokens]), stream

    def _finish(self, beam: Beam) -> None:
        score = beam.logprob / len(beam.tokens) ** self.options.length_penalty
        self.finished.append((score, beam))
        self.finished.sort(key=lambda one: -one[0])
        del self.finished[self.options.width :]

    def _settled(self, length: int) -> bool:
        """Whether those that go on are not waited for."""
        if len(self.finished) < self.options.width:
            return False
        early, penalty = self.options.early_stopping, self.options.length_penalty
        if early is True:
            return True
        reached = self.most if early == "never" and penalty > 0.0 else length
        return self.live[0].logprob / reached**penalty <= self.finished[-1][0]

    def best(self) -> list[FinishedBeam]:
        """Best first."""
        return [FinishedBeam(beam, score, *self._ending(beam)) for score, beam in self.finished]

    def _ending(self, beam: Beam) -> tuple[str, str, str | int | None]:
        """Its text, why it has finished, and which stop string or stop token of its sampling params ended it."""
        last, text = beam.tokens[-1], ""
        stop_reason: str | int | None = None
        by_token = last in self.stop_tokens
        if self.engine.tokenizer is not None:
            shown = beam.tokens[:-1] if by_token else beam.tokens
            text, stream = self._read(shown, (), self.root.sampling.min_tokens)
            stop_reason = stream.stopped or None
            text += stream.finish()
        if by_token and (last not in self.engine.stop_tokens or self.root.sampling.ignore_eos):
            stop_reason = last
        return text, "stop" if beam.ended else "length", stop_reason


def _for_a_step(engine: Engine, sampling: Sampling, options: BeamOptions) -> Sampling:
    """What one step of a beam reports: enough tokens that `width` go on, whichever of them end."""
    ends = len(engine.stop_tokens | sampling.stop_tokens)
    most = MAX_REPORTED - ends
    if not 1 <= options.width <= most:
        raise UserError("n", f"beam search takes 1 to {most} beams, not {options.width}")
    refuse_request(engine.model.config, "use_beam_search", "beams could not share that of their beginning")
    if engine.page_pool.store is not None:
        problem = "beams share the pages of their beginning, and this engine prunes its cache for each request alone"
        raise UserError("use_beam_search", problem, "Leave it out.")
    if sampling.grammar is not None:
        raise UserError("use_beam_search", "beams cannot follow a grammar", "Leave one out.")
    if sampling.prompt_logprobs is not None:
        raise UserError("prompt_logprobs", "are not given with use_beam_search", "Ask for them alone.")
    if sampling.logprob_tokens:
        raise UserError("logprob_token_ids", "are not given with use_beam_search", "Leave one out.")
    reported = max(options.width + ends, sampling.logprobs or 0)
    return replace(sampling, temperature=0.0, logprobs=reported, processed_logprobs=True, stop=(), record_draws=False)


def beam_search(
    engine: Engine,
    prompt: str | Sequence[int],
    options: BeamOptions,
    sampling: Sampling | None = None,
    each: Callable[[BeamSearch], None] = lambda search: None,
) -> list[FinishedBeam]:
    """The best beams, best first. `each` is called after every step."""
    search = BeamSearch(engine, engine.request(prompt, sampling), options)
    while not search.done:
        requests = search.requests()
        engine.complete(requests)
        search.advance([request.logprobs[-1] for request in requests])
        each(search)
    return search.best()
