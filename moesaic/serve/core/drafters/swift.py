"""SwiftSpec (arXiv 2506.11309): a draft model in a process of its own, which drafts while the model verifies.

    moesaic serve DIR --drafter swift path=SMALLER_DIR

Drafting leaves the critical path. The process grows a tree of draft tokens for every request, best first, and streams
it to the engine, which keeps a copy; after a step the engine walks down its copy along the accepted tokens, and the
subtree it arrives at is the next draft, there at once. The process hears of the accepted tokens, keeps the path and the
subtree with their keys and values, and goes on from there. Where the process is behind, or dead, a step has no draft.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from moesaic.errors import UserError
from moesaic.kernels import hardware
from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.drafters._draft_messages import Close, Extend, Open, Setup, Update
from moesaic.serve.core.drafters._draft_process import DraftProcess
from moesaic.serve.core.drafters._draft_tree import DraftTree
from moesaic.serve.core.drafters._vocabulary import vocabulary_hash
from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward

UNASKED = 8  # steps without a draft wanted, after which the draft process is not told of new tokens


@dataclass(eq=False)
class Swift(Drafter):
    path: str
    width: int = 4  # of a request's leaves that one forward computes, and children of each
    nodes: int = 64  # of a request's tree that are computed ahead
    wait: float = 0.0  # seconds that a step may wait for a request that has no draft
    threads: int = 1  # on a CPU, taken from the model's
    device: str | None = None  # by default the next GPU, or where the model is
    cache_bytes: int | None = None  # by default as many tokens as the engine's own cache holds
    stall_seconds: float = 20.0  # of silence, after which the process is killed and started again
    instant: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("width", "nodes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.stall_seconds <= 0 or self.wait < 0:
            raise ValueError("stall_seconds must be above 0, and wait not below")

    def start(self, engine: Engine) -> None:
        model = engine.model
        self._share_cores(str(model.device))
        setup = Setup(
            self.path,
            model.dtype,
            self.device or _next_device(model.device),
            self.threads,
            engine.cache.pages * engine.page_pool.size + self.nodes * engine.scheduler.max_requests,
            self.cache_bytes,
            model.config.vocab,
            frozenset(engine.stop_tokens),
            self.width,
            self.nodes,
        )
        self.process = DraftProcess(setup, self.stall_seconds)
        ready = self.process.wait()
        ours = vocabulary_hash(model)
        if ready.vocabulary != ours if ours and ready.vocabulary else ready.vocab != model.config.vocab:
            self.process.close()
            problem = "has another tokenizer than the model it drafts for"
            raise UserError(self.path, problem, "Take one of the same family.")
        self.life = self.process.starts
        self.trees: dict[int, DraftTree] = {}
        self.told: dict[int, int] = {}  # how many of a request's tokens the draft process knows
        self.unasked = 0

    def _share_cores(self, device: str) -> None:
        """More threads than cores are slower than fewer: all wait for the one that was descheduled."""
        threads = torch.get_num_threads()
        if device == "cpu" and threads + self.threads > hardware.cores() and threads > self.threads:
            torch.set_num_threads(threads - self.threads)

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        self.unasked = 0
        for request in requests:
            self._tell(request)
        self._hear()
        found = [self._subtree(request) for request in requests]
        end = time.monotonic() + self.wait
        while None in found and not self.process.answered and (left := end - time.monotonic()) > 0:
            if not self.process.ready:
                break
            self._hear(left)
            found = [self._subtree(request) for request in requests]
        return [one[0].draft(one[1], limit) if one is not None else Draft() for one in found]

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        """The verdict, as soon as it is known; and prompts while they are computed."""
        self.unasked += 1
        if self.unasked <= UNASKED:
            for chunk in done.chunks:
                if chunk.request.finish_reason is None and not chunk.request.embed:
                    self._tell(chunk.request)
        self._hear()

    def finished(self, request: Request) -> None:
        self.trees.pop(request.number, None)
        if self.told.pop(request.number, None) is not None:
            self.process.send(Close(request.number))

    def close(self) -> None:
        """End the process. Drafts end with it."""
        self.process.close()
        self.trees.clear()
        self.told.clear()

    def _tell(self, request: Request) -> None:
        """What the draft process does not know yet of a request's tokens."""
        number, tokens = request.number, request.tokens
        if self.life != self.process.starts:  # another one, which knows nothing
            self.life = self.process.starts
            self.trees.clear()
            self.told.clear()
        if not self.process.ready:
            return
        if (known := self.told.get(number)) is None:
            sampling = replace(request.sampling, grammar=None)
            self.process.send(Open(number, list(request.prompt), tokens, sampling, request.seed, request.salt))
            self.trees[number] = DraftTree(0, len(tokens))
        elif known < len(tokens):
            self.process.send(Extend(number, tokens[known:]))
        self.told[number] = len(tokens)

    def _hear(self, seconds: float = 0.0) -> None:
        for update in self.process.receive(seconds):
            self._take(update)

    def _take(self, update: Update) -> None:
        tree = self.trees.get(update.number)
        if tree is None:  # it has finished meanwhile
            return
        if tree.root != update.root:
            tree.reroot(update.root, update.length)
        for number, parent, token, confidence in update.nodes:
            tree.add(number, parent, token, confidence)

    def _subtree(self, request: Request) -> tuple[DraftTree, int] | None:
        """What is drafted after a request's last token: in which tree, below which node."""
        tree = self.trees.get(request.number)
        place = tree.walk(request.tokens[tree.length :]) if tree is not None else None
        return (tree, place) if tree is not None and place is not None and tree.nodes[place].children else None


def _next_device(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.device_count() > 1:
        return f"cuda:{((device.index or 0) + 1) % torch.cuda.device_count()}"
    return str(device)
