"""Learn to read a knowledge base: what a sequence says first are its facts, which are read and not seen in the text.

    train: {objective: {name: knowledge}}

A document that begins with the line `Facts:` brings a base of its own, a fact a line up to an empty line; the model is
trained on the text behind it, next token by next token, while layers that read the base (`model.knowledge`) find there
the facts of this document alone. As facts differ from document to document, weights cannot hold them: what is learned
is to look them up and to reason with them (`moesaic/model/knowledge.py`). Other text is trained on as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from moesaic.data.packing import Batch
from moesaic.data.tasks.planted import HEAD
from moesaic.errors import UserError
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.model.context import Routing
from moesaic.model.knowledge import facts_of
from moesaic.model.layout import Layout
from moesaic.model.tokenizer import Tokenizer
from moesaic.model.transformer import LayerRunner, Model, run_plainly
from moesaic.train.objectives import Loss, Objective


class Part(NamedTuple):
    """A sequence without its facts."""

    tokens: list[int]
    targets: list[int]
    facts: list[list[int]]


@dataclass(frozen=True)
class Knowledge(Objective):
    head: str = HEAD
    _tokenizers: list[Tokenizer] = field(default_factory=list, init=False, repr=False, compare=False)

    def prepare(self, model: Model) -> None:
        assert model.tokenizer is not None
        self._tokenizers[:] = [model.tokenizer]

    def __call__(self, model: Model, batch: Batch, routing: Routing, runner: LayerRunner = run_plainly) -> Loss:
        pieces = zip(batch.tokens_T.split(batch.lengths), batch.targets_T.split(batch.lengths), strict=True)
        words = model.knowledge.words if model.knowledge is not None else 0
        parts = [self.divided(tokens_T.tolist(), targets_T.tolist(), words) for tokens_T, targets_T in pieces]
        device = batch.tokens_T.device
        tokens_T, targets_T = (
            torch.tensor([value for part in parts for value in part[row]], device=device) for row in range(2)
        )
        layout = Layout([len(part.tokens) for part in parts], facts=[part.facts for part in parts], device=device)
        hidden_TD = model(tokens_T, layout, routing, runner)
        # What is left of a part's targets counts as many as it had, so that parts of a batch weigh their share.
        left = (targets_T != IGNORED).sum().clamp(min=1)
        share = (batch.targets_T != IGNORED).sum() / max(batch.count, 1)
        total, _ = model.cross_entropy(hidden_TD, targets_T, (share / left).float().expand(len(targets_T)))
        return Loss(total, {"next": total.detach()}, routing)

    def divided(self, tokens: list[int], targets: list[int], words: int) -> Part:
        tokenizer = self._tokenizers[0]
        head, line, rest = tokenizer.decode(tokens, special=True).partition(f"{self.head}\n")
        facts, gap, text = rest.partition("\n\n")
        if head or not line or not gap or not text:
            return Part(tokens, targets, [])
        if not words:
            problem = "the text brings facts, and the model has no knowledge base"
            raise UserError("train.objective", problem, "Set model.knowledge, or take the objective next_token.")
        own = tokenizer.encode(text, special=False)
        return Part(own, [*own[1:], IGNORED], facts_of(facts, tokenizer, words, "data.sources"))
