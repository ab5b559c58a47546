"""SRT: draft from earlier completions, by a cached suffix tree for each prompt and one of recent completions.

    moesaic serve DIR --drafter suffix tokens=200000

A prompt's tree holds the prompt and all its completions, those in flight included, and outlives its requests: rollouts
of one prompt resemble each other. Where another completion, of whatever prompt, matches longer, its tokens are drafted.
Tenants (salts) never share trees.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.drafters._suffix_tree import Place, SuffixTree, expand
from moesaic.serve.core.request import Request

if TYPE_CHECKING:
    from moesaic.model.transformer import Model
    from moesaic.serve.core.engine import Engine
    from moesaic.serve.core.forward_pass import Forward


@dataclass(eq=False)
class Suffix(Drafter):
    tokens: int = 200_000  # kept over all prompts and completions; each takes some 400 bytes
    instant: ClassVar[bool] = True
    drafts_for_shadows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError("tokens must be at least 1")

    @classmethod
    def offered(cls, model: Model, draft_models: Sequence[str]) -> Sequence[Drafter]:
        return [cls()]

    def start(self, engine: Engine) -> None:
        self.trees: OrderedDict[Hashable, SuffixTree] = OrderedDict()  # least recently used first
        self.size = 0  # tokens in all of them
        self.known: dict[int, _Known] = {}

    def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
        return [expand(self._match(request), limit) for request in requests]

    def observe(self, done: Forward, hidden_TD: Tensor) -> None:
        for chunk in done.chunks:
            if chunk.request.written:
                self._note(chunk.request)
        while self.size > self.tokens:
            self.size -= self.trees.popitem(last=False)[1].size

    def finished(self, request: Request) -> None:
        self.known.pop(request.number, None)

    def _match(self, request: Request) -> list[Place]:
        """Places where the longest match is, in the prompt's own tree if it is as long elsewhere."""
        best: list[Place] = []
        longest = 0
        if request.number not in self.known:
            self._note(request)
        for key in (*self.known[request.number].trees, ("before", request.salt)):
            if (tree := self.trees.get(key)) is not None:
                found = tree.match(request.tokens)
                length = max((place.length for place in found), default=0)
                if length > longest:
                    best, longest = found, length
        return best

    def _note(self, request: Request) -> None:
        """Add a request's new tokens to its prompt's tree and that of recent completions."""
        prompt = len(request.prompt)
        if (known := self.known.get(request.number)) is None:
            own = ("prompt", request.salt, hash(tuple(request.prompt)))
            known = self.known[request.number] = _Known((own, ("now", request.salt)), prompt)
            if own not in self.trees:
                self._add(own, request, 0, prompt)
        for key in known.trees:
            self._add(key, request, known.tokens, len(request.tokens))
        known.tokens = len(request.tokens)
        if self.trees["now", request.salt].size > self.tokens // 8:
            # Two generations, so that the oldest completions can go without being looked for.
            self.size -= self.trees.pop(("before", request.salt), SuffixTree()).size
            self.trees["before", request.salt] = self.trees.pop(("now", request.salt))

    def _add(self, key: Hashable, request: Request, start: int, stop: int) -> None:
        self.trees.setdefault(key, SuffixTree()).add(request.tokens, start, stop)
        self.trees.move_to_end(key)
        self.size += stop - start


@dataclass
class _Known:
    """A request's trees, and how many of its tokens they hold."""

    trees: tuple[Hashable, ...]
    tokens: int
