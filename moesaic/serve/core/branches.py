"""APAR (auto-parallel decoding): a completion that branches. The model emits a fork token where it can detail a point
elsewhere; the detail is decoded as a branch of its own, beginning with a child token, while the parent continues. All
share the pages of their prefix, and are joined in reading order: a branch stands where its fork token was.

    answer = answer_in_branches(engine, prompt, Sampling(max_tokens=400), max_branches=8)
    answer.text, answer.branches, answer.steps

Only a model trained on such tokens branches (`align/forks.py`); another completes in one branch, as always.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Output, Request, Sampling, TokenLogprob
from moesaic.serve.core.sequence_states import refuse_request
from moesaic.serve.core.text import TextStream

FORK, CHILD = "<|fork|>", "<|child|>"
MAX_BRANCHES = 64


@dataclass
class Branch:
    """One branch, and the branches that fork off it, by the place of the fork token. Its request may be ahead of the
    outputs that have come, which are what counts."""

    request: Request
    tokenizer: Tokenizer
    forks: dict[int, Branch] = field(default_factory=dict)
    outputs: list[tuple[int, TokenLogprob]] = field(default_factory=list)  # its generated tokens
    finish_reason: str | None = None

    def stream(self) -> TextStream:
        request, sampling = self.request, self.request.sampling
        return TextStream(self.tokenizer, request.prompt, sampling.stop, sampling.min_tokens, sampling.markers)

    @property
    def text(self) -> str:
        stream, text = self.stream(), ""
        for place, (token, _) in enumerate(self.outputs, len(self.request.prompt)):
            text += stream.push(token)
            if place in self.forks:
                text += stream.finish() + self.forks[place].text
        return text + stream.finish()


@dataclass
class _Reading:
    """How far a branch was read."""

    branch: Branch
    stream: TextStream
    read: int = 0  # of its generated tokens


class Branching:
    """A request answered in branches: `requests` are to be submitted, `take` their outputs gives those that follow, and
    `read` gives what can be read so far, as outputs of the request itself, which is not submitted."""

    def __init__(self, engine: Engine, shown: Request, max_branches: int) -> None:
        self.engine, self.shown, self.max_branches = engine, shown, max_branches
        self.fork, self.child = _marks(engine)
        if shown.sampling.grammar is not None:
            raise UserError("parallel_branches", "branches cannot follow a grammar", "Leave one out.")
        if shown.sampling.prompt_logprobs is not None:
            raise UserError("prompt_logprobs", "are not given with parallel_branches", "Ask for them alone.")
        self.branches: list[Branch] = []  # the root first
        self.owners: dict[int, Branch] = {}
        root = self._begin(shown.prompt)
        root.request.seed = shown.seed
        self.reading = [_Reading(root, root.stream())]

    def _begin(self, prompt: Sequence[int]) -> Branch:
        shown, number = self.shown, len(self.branches)
        request = self.engine.request(
            prompt, shown.sampling, sibling=number, salt=shown.salt, priority=shown.priority, deadline=shown.deadline
        )
        request.adapter, request.arrived = shown.adapter, shown.arrived
        assert self.engine.tokenizer is not None
        self.branches.append(Branch(request, self.engine.tokenizer))
        self.owners[request.number] = self.branches[-1]
        return self.branches[-1]

    def requests(self) -> list[Request]:
        return [self.branches[0].request]

    def take(self, output: Output) -> list[Request]:
        """The branches that an output forks off."""
        branch, begun = self.owners[output.request.number], list[Request]()
        branch.finish_reason = output.finish_reason
        for token, entry in zip(output.tokens, output.logprobs, strict=True):
            place = len(branch.request.prompt) + len(branch.outputs)
            branch.outputs.append((token, entry))
            # A branch does not branch again: which of two took the last place would depend on who was faster.
            room = len(self.branches) < self.max_branches and place + 2 < self.engine.max_length
            if token == self.fork and branch is self.branches[0] and room:
                before = [one for one, _ in branch.outputs]
                branch.forks[place] = self._begin([*branch.request.prompt, *before, self.child])
                begun.append(branch.forks[place].request)
        return begun

    def read(self) -> Output:
        """What follows in reading order and is there: of the branch being read, what has come; of what stands behind
        it, nothing until it has ended."""
        output = Output(self.shown, [], "", [])
        while self.reading:
            at = self.reading[-1]
            branch = at.branch
            if at.read < len(branch.outputs):
                token, entry = branch.outputs[at.read]
                output.tokens.append(token)
                output.logprobs.append(entry)
                output.text += at.stream.push(token)
                if (inner := branch.forks.get(len(branch.request.prompt) + at.read)) is not None:
                    output.text += at.stream.finish()
                    self.reading.append(_Reading(inner, inner.stream()))
                at.read += 1
            elif branch.finish_reason is not None:
                output.text += at.stream.finish()
                self.reading.pop()
            else:
                break
        self._show(output)
        return output

    def _show(self, output: Output) -> None:
        """The request that was asked for has what was read."""
        shown, root = self.shown, self.branches[0].request
        shown.tokens += output.tokens
        shown.logprobs += output.logprobs
        shown.cached, shown.first_token, shown.last_token = root.cached, root.first_token, self.engine.clock()
        if self.done:
            ended = [branch.finish_reason or "abort" for branch in self.branches]
            shown.finish_reason = next((reason for reason in ended if reason != "stop"), "stop")
            shown.stop_reason = root.stop_reason
            output.finish_reason = shown.finish_reason

    @property
    def done(self) -> bool:
        return not self.reading


def _marks(engine: Engine) -> tuple[int, int]:
    if engine.tokenizer is None:
        raise UserError("prompt", "the model has no tokenizer", "Branches are marked by tokens it must know.")
    fork, child = (engine.tokenizer.fast.token_to_id(mark) for mark in (FORK, CHILD))
    if fork is None or child is None:
        raise UserError("parallel_branches", f"the tokenizer has no {FORK} and {CHILD}", "Answer in one branch.")
    refuse_request(engine.model.config, "parallel_branches", "branches could not share that of their beginning")
    if engine.page_pool.store is not None:
        problem = "branches share the pages of their beginning, and this engine prunes its cache for each request alone"
        raise UserError("--kv-policy", problem, "Answer in one branch.")
    return fork, child


@dataclass(frozen=True)
class BranchedAnswer:
    text: str
    branches: list[Branch]  # the root first
    steps: int  # of the engine: fewer than tokens where branches were decoded together
    tokens: list[int]  # in reading order


def answer_in_branches(
    engine: Engine,
    prompt: str | Sequence[int],
    sampling: Sampling | None = None,
    max_branches: int = 8,
    each: Callable[[Output], None] = lambda output: None,
) -> BranchedAnswer:
    """At most `max_branches`, the first included; forks beyond that, and in a branch, are ignored. `each` is called
    with what can be read after every step."""
    _marks(engine)
    branching = Branching(engine, engine.request(prompt, sampling), max_branches)
    driver: EngineDriver[None] = EngineDriver(engine)
    for request in branching.requests():
        driver.add(request, None)
    steps, text = engine.counts.steps, ""
    try:
        while not branching.done:
            step = driver.step()
            if step.error is not None:
                raise step.error
            for _, output in step.outputs:
                for request in branching.take(output):
                    driver.add(request, None)
            read = branching.read()
            text += read.text
            each(read)
    finally:  # also on Ctrl-C
        driver.abort_all()
    shown = branching.shown
    steps = engine.counts.steps - steps
    return BranchedAnswer(text, branching.branches, steps, shown.tokens[len(shown.prompt) :])
