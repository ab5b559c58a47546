"""A synchronous step on a GPU: its draft tokens are verified before more are proposed.

Every draft token is a row of its sequence like the last known token, so that verifying it gives the bits that decoding
it would have given. Every row's next token is sampled on the device where it can be; else there are the logits.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.kernels.cuda.graphed_step import LaunchedStep
from moesaic.kernels.cuda.step_inputs import ChunkRows
from moesaic.model.layout import Span
from moesaic.serve.core.draws import draw
from moesaic.serve.core.forward_pass import Chunk, Forward
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampler import Sampler
from moesaic.serve.gpu.decode_batch import Slot, samples_on_device

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


def rows_of(chunk: Chunk, slot: Slot, sampled: int) -> ChunkRows:
    """The rows of a chunk; after so many of them, the last ones, a token is sampled."""
    request = chunk.request
    rows = ChunkRows(slot.index, request.computed, chunk.new_tokens(), sampled, prompt=len(request.prompt))
    if sampled and slot.on_device and request.sampling.temperature > 0:
        first = request.computed + chunk.tokens
        rows.temperature = request.sampling.temperature
        rows.draws = [draw(request.seed, position) for position in range(first, first + sampled)]
    return rows


def token_logprob(request: Request, token: int, logprob: float, drawn: float) -> TokenLogprob:
    return TokenLogprob(token, logprob, drawn=drawn if request.sampling.record_draws else None)


class GraphedForward(Forward):
    def __init__(self, chunks: list[Chunk], engine: Engine, launched: LaunchedStep) -> None:
        super().__init__(chunks, engine.version)
        self.engine, self.launched, self.hidden_TD = engine, launched, launched.hidden_TD
        self.spans = []
        start = 0
        for number, chunk in enumerate(chunks):
            self.spans.append(Span(number, start, start + chunk.rows, chunk.request.computed))
            start += chunk.rows
        self.sampled = list(zip(*launched.wait(), strict=True))
        self.done = True

    def sampler(self, rows: list[int]) -> GraphedForward:
        return self

    def sample(self, row: int, request: Request, stop_tokens: set[int]) -> TokenLogprob:
        if samples_on_device(request.sampling):
            return token_logprob(request, *self.sampled[row])
        return self._on_host.sample(row, request, stop_tokens)

    @cached_property
    def _on_host(self) -> Sampler:
        return Sampler(self.launched.logits_RV)

    @property
    def routes(self) -> dict[int, Tensor]:
        """The graph has counted them: `routing`, of which the host would, stays empty."""
        layers = self.engine.experts.starts
        return {layer: routes_TK.long() for layer, routes_TK in zip(layers, self.launched.routes_LTK)}
