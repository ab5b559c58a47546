"""Consistency score by its cheap proxy ("Characterizing Structural Regularities of Labeled Data").

    data: {scores: [{name: consistency, models: [RUN/checkpoints/step-00000200, RUN/checkpoints/step-00000400]}]}
    data: {curriculum: consistency}

The mean probability of the first `tokens` tokens over the course of training: over all models, which are checkpoints
of a small run on text of the same kind. The score itself, from models that have not seen a document, and how far the
proxy agrees with it: `moesaic consistency`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from moesaic.data.quality import QualityScore
from moesaic.data.quality._predicted import logprobs
from moesaic.data.records import Document
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint

if TYPE_CHECKING:
    from moesaic.model.transformer import Model


@dataclass(frozen=True)
class ConsistencyScore(QualityScore):
    one_by_one: ClassVar[bool] = False  # documents are scored in batches

    models: tuple[str, ...]
    tokens: int = 512
    batch_tokens: int = 4096

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("names no model; give checkpoints of a run")
        if self.tokens < 2 or self.batch_tokens < self.tokens:
            raise ValueError("tokens must be at least 2, and batch_tokens at least tokens")

    def check(self, columns: Sequence[str], place: str) -> None:
        for model in self.models:
            match(open_checkpoint(model))  # a model that is not there is missed before any text is read

    @cached_property
    def _loaded(self) -> list[Model]:
        import moesaic

        return [moesaic.load(model) for model in self.models]

    def score(self, documents: Sequence[Document]) -> list[float]:
        totals = [0.0] * len(documents)
        for path, model in zip(self.models, self._loaded, strict=True):
            found = logprobs(model, path, documents, self.tokens, self.batch_tokens)
            for number, values in enumerate(found):
                # A text too short to predict: as if nothing had been.
                totals[number] += float(values.exp().mean()) if len(values) else 1 / model.config.vocab
        return [total / len(self.models) for total in totals]
