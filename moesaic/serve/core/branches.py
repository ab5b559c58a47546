"""APAR: an answer that divides itself. The model marks a point it can detail elsewhere with a fork token; the detail is
written in a branch of its own, beginning with a child token, while the answer goes on. All share their prefix's pages.

    answer = answer_in_branches(engine, prompt, Sampling(max_tokens=400), most=8)
    answer.text, answer.branches, answer.steps

Only a model trained on such marks divides its answers; another answers in one branch, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.text import TextStream

FORK, CHILD = "<|fork|>", "<|child|>"


@dataclass
class Branch:
    """One branch, and by the place of the fork the branches that left it."""

    request: Request
    tokenizer: Tokenizer
    forks: dict[int, Branch] = field(default_factory=dict)

    @property
    def text(self) -> str:
        request, sampling = self.request, self.request.sampling
        stream = TextStream(self.tokenizer, request.prompt, sampling.stop, sampling.min_tokens)
        said = ""
        for place in range(len(request.prompt), len(request.tokens)):
            said += stream.push(request.tokens[place])
            if place in self.forks:
                said += stream.finish() + self.forks[place].text
        return said + stream.finish()


@dataclass(frozen=True)
class BranchedAnswer:
    text: str
    branches: list[Branch]  # the answer itself first
    steps: int  # of the engine: fewer than tokens where branches were written side by side


def answer_in_branches(
    engine: Engine, prompt: str | Sequence[int], sampling: Sampling | None = None, most: int = 8
) -> BranchedAnswer:
    """At most `most` branches, the first included; forks beyond that are ignored, and the answer goes on without."""
    if engine.tokenizer is None:
        raise UserError("prompt", "the model has no tokenizer", "Branches are marked by tokens it must know.")
    fork, child = (engine.tokenizer.fast.token_to_id(mark) for mark in (FORK, CHILD))
    if fork is None or child is None:
        raise UserError(engine.tokenizer.place, f"the tokenizer has no {FORK} and {CHILD}", "Answer in one branch.")

    if engine.page_pool.store is not None:
        problem = "branches share the pages of their beginning, and this engine prunes its cache for each request alone"
        raise UserError("--kv-policy", problem, "Answer in one branch.")

    first = Branch(engine.request(prompt, sampling), engine.tokenizer)
    branches = {first.request.number: first}
    engine.add(first.request)
    began = engine.counts.steps
    try:
        while any(branch.request.finish_reason is None for branch in branches.values()):
            for output in engine.step():
                branch = branches.get(output.request.number)
                tokens = output.request.tokens
                for place in range(len(tokens) - len(output.tokens), len(tokens)):
                    if branch is not None and tokens[place] == fork and len(branches) < most:
                        detail = engine.request([*tokens[: place + 1], child], sampling, sibling=len(branches))
                        branch.forks[place] = Branch(detail, engine.tokenizer)
                        branches[detail.number] = branch.forks[place]
                        engine.add(detail)
    finally:  # also on Ctrl-C
        for branch in branches.values():
            engine.abort(branch.request)
    return BranchedAnswer(first.text, list(branches.values()), engine.counts.steps - began)
