"""A step on a GPU that is waited for: its guesses are checked before more are made.

Every guess is a row of its sequence like the answer's last token, so that checking it gives the bits that writing it
would have given. What the device can choose it has chosen for every row; for other wishes there are the logits.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from moesaic.model.layout import Span
from moesaic.serve.core.forward_pass import Chunk, Forward
from moesaic.serve.core.request import Request, TokenLogprob
from moesaic.serve.core.sampler import Choices, draw
from moesaic.serve.gpu.decode_batch import Seat, chosen_on_device
from moesaic.serve.gpu.graphed_step import Flight
from moesaic.serve.gpu.inputs import Part

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


def part_of(chunk: Chunk, seat: Seat, followed: int) -> Part:
    """The rows of a share, so many of the last of which are followed by a token."""
    request = chunk.request
    part = Part(seat.slot, request.computed, chunk.new_tokens(), followed)
    if followed and seat.simple and request.sampling.temperature > 0:
        first = request.computed + chunk.tokens
        part.temperature = request.sampling.temperature
        part.draws = [draw(request.seed, place) for place in range(first, first + followed)]
    return part


def told(request: Request, token: int, logprob: float, drawn: float) -> TokenLogprob:
    return TokenLogprob(token, logprob, drawn=drawn if request.sampling.record_draws else None)


class GraphedForward(Forward):
    def __init__(self, chunks: list[Chunk], engine: Engine, flight: Flight) -> None:
        super().__init__(chunks, engine.version)
        self.engine, self.flight, self.hidden_TD = engine, flight, flight.hidden_TD
        self.spans = []
        start = 0
        for number, chunk in enumerate(chunks):
            self.spans.append(Span(number, start, start + chunk.rows, chunk.request.computed))
            start += chunk.rows
        self.chosen = list(zip(*flight.wait(), strict=True))
        self.done = True

    def choices(self, rows: list[int]) -> GraphedForward:
        return self

    def choose(self, row: int, request: Request, stop_tokens: set[int]) -> TokenLogprob:
        if chosen_on_device(request.sampling):
            return told(request, *self.chosen[row])
        return self._by_host.choose(row, request, stop_tokens)

    @cached_property
    def _by_host(self) -> Choices:
        return Choices(self.flight.logits_RV)

    @property
    def routes(self) -> dict[int, Tensor]:
        """The graph has counted them: `routing`, of which the host would, stays empty."""
        return {layer: routes_TK.long() for layer, routes_TK in zip(self.engine.experts.starts, self.flight.routes_LTK)}
