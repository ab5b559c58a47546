"""How well a given model predicts a text: minus the logarithm of its perplexity, so that the expected is better.

    data: {quality: {name: perplexity, model: out/smollm2, tokens: 256}}

The mean log-probability of the first `tokens` tokens, in the model's own tokens, many documents in one flat forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from moesaic.data.quality import QualityScore
from moesaic.data.quality._predicted import logprobs
from moesaic.data.records import Document
from moesaic.errors import UserError
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    from moesaic.model.transformer import Model


@dataclass(frozen=True)
class PerplexityScore(QualityScore):
    one_by_one: ClassVar[bool] = False  # documents are scored in batches

    model: str
    tokens: int = 512
    batch_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.batch_tokens < self.tokens:
            raise ValueError("tokens must be at least 2, and batch_tokens at least tokens")

    def check(self, columns: Sequence[str], place: str) -> None:
        source = open_checkpoint(self.model)  # a model that is not there is missed before any text is read
        match(source)
        if Tokenizer.from_files(source.files, source.place) is None:
            raise UserError(self.model, "the model has no tokenizer", "Perplexity needs one that has.")

    @cached_property
    def _model(self) -> Model:
        import moesaic

        return moesaic.load(self.model)

    def score(self, documents: Sequence[Document]) -> list[float]:
        nothing = -math.log(self._model.config.vocab)  # of a text too short to predict: as if nothing had been
        found = logprobs(self._model, self.model, documents, self.tokens, self.batch_tokens)
        return [float(values.mean()) if len(values) else nothing for values in found]
