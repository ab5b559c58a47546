"""APAR (auto-parallel decoding): a completion that branches. The model emits a fork token where it can detail a point
elsewhere; the detail is decoded as a branch of its own, beginning with a child token, while the parent continues. All
share the pages of their prefix.

    answer = answer_in_branches(engine, prompt, Sampling(max_tokens=400), max_branches=8)
    answer.text, answer.branches, answer.steps

Only a model trained on such tokens branches; another completes in one branch, as always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.driver import EngineDriver
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.text import TextStream

FORK, CHILD = "<|fork|>", "<|child|>"


@dataclass
class Branch:
    """One branch, and the branches that fork off it, by the place of the fork token."""

    request: Request
    tokenizer: Tokenizer
    forks: dict[int, Branch] = field(default_factory=dict)

    @property
    def text(self) -> str:
        request, sampling = self.request, self.request.sampling
        stream = TextStream(self.tokenizer, request.prompt, sampling.stop, sampling.min_tokens, sampling.markers)
        text = ""
        for place in range(len(request.prompt), len(request.tokens)):
            text += stream.push(request.tokens[place])
            if place in self.forks:
                text += stream.finish() + self.forks[place].text
        return text + stream.finish()


@dataclass(frozen=True)
class BranchedAnswer:
    text: str
    branches: list[Branch]  # the root first
    steps: int  # of the engine: fewer than tokens where branches were decoded together


def answer_in_branches(
    engine: Engine, prompt: str | Sequence[int], sampling: Sampling | None = None, max_branches: int = 8
) -> BranchedAnswer:
    """At most `max_branches`, the first included; forks beyond that are ignored."""
    if engine.tokenizer is None:
        raise UserError("prompt", "the model has no tokenizer", "Branches are marked by tokens it must know.")
    fork, child = (engine.tokenizer.fast.token_to_id(mark) for mark in (FORK, CHILD))
    if fork is None or child is None:
        raise UserError(engine.tokenizer.place, f"the tokenizer has no {FORK} and {CHILD}", "Answer in one branch.")

    if engine.page_pool.store is not None:
        problem = "branches share the pages of their beginning, and this engine prunes its cache for each request alone"
        raise UserError("--kv-policy", problem, "Answer in one branch.")

    root = Branch(engine.request(prompt, sampling), engine.tokenizer)
    branches = [root]
    driver: EngineDriver[Branch] = EngineDriver(engine)
    driver.add(root.request, root)
    steps = engine.counts.steps
    try:
        while any(branch.request.finish_reason is None for branch in branches):
            step = driver.step()
            if step.error is not None:
                raise step.error
            for branch, output in step.outputs:
                tokens = output.request.tokens
                for place in range(len(tokens) - len(output.tokens), len(tokens)):
                    if tokens[place] == fork and len(branches) < max_branches:
                        detail = engine.request([*tokens[: place + 1], child], sampling, sibling=len(branches))
                        branches.append(Branch(detail, engine.tokenizer))
                        branch.forks[place] = branches[-1]
                        driver.add(detail, branches[-1])
    finally:  # also on Ctrl-C
        driver.abort_all()
    return BranchedAnswer(root.text, branches, engine.counts.steps - steps)
