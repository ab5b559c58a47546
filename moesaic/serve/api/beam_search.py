"""`use_beam_search`: a completion's choices are the best beams of its prompt, and all come at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from moesaic.errors import UserError
from moesaic.serve.api.schema.sampling import GenerationRequest
from moesaic.serve.api.service import Service
from moesaic.serve.core.beams import BeamOptions, BeamSearch
from moesaic.serve.core.engine_loop import OutputStream
from moesaic.serve.core.request import Output, Request


class BeamOutputs:
    """Read like the outputs of `requests`, which are those of the first prompt, then those of the second, and so on."""

    def __init__(self, service: Service, body: GenerationRequest, requests: Sequence[Request], prompts: int) -> None:
        if body.stream:
            raise UserError("stream", "beams cannot be streamed: the best are known at the end", "Leave it out.")
        self.service = service
        width = len(requests) // prompts
        options = BeamOptions(
            width,
            1.0 if body.length_penalty is None else body.length_penalty,
            False if body.early_stopping is None else body.early_stopping,
        )
        self.groups = [requests[start : start + width] for start in range(0, len(requests), width)]
        self.searches = [BeamSearch(service.engine, group[0], options) for group in self.groups]
        service.check_count(len(requests))  # as many as its later steps have
        self.steps: list[Request] = []
        self.outputs = self._submit()

    async def batches(self) -> AsyncIterator[list[Output]]:
        async with asyncio.timeout(self.service.settings.request_seconds):
            first = await self._step()
            for group, request in zip(self.groups, first, strict=True):
                for one in group:
                    one.cached, one.transferred, one.recomputed = (
                        request.cached,
                        request.transferred,
                        request.recomputed,
                    )
                    one.first_token = request.first_token
            while not all(search.done for search in self.searches):
                self.outputs = self._submit(again=True)
                await self._step()
        yield await asyncio.to_thread(self._finished)

    def _finished(self) -> list[Output]:
        return [output for group, search in zip(self.groups, self.searches) for output in finished(group, search)]

    def close(self) -> None:
        self.outputs.close()

    def _submit(self, again: bool = False) -> OutputStream:
        """The next step of every prompt's live beams, all together."""
        self.steps = [request for search in self.searches if not search.done for request in search.requests()]
        return self.service.submit(self.steps, again=again)

    async def _step(self) -> list[Request]:
        async for _ in self.outputs.batches():
            pass
        self.outputs.close()
        if self.searches[0].stop:  # texts are looked through
            await asyncio.to_thread(self._advance)
        else:
            self._advance()
        return self.steps

    def _advance(self) -> None:
        found = iter(request.logprobs[-1] for request in self.steps)
        for search in self.searches:
            if not search.done:
                search.advance([next(found) for _ in search.live])


def finished(group: Sequence[Request], search: BeamSearch) -> list[Output]:
    """The requests that were asked for, as if each had been given one of the beams, best first."""
    outputs = []
    best = search.best()
    for request, found in zip(group, best):
        tokens, entries = list(found.beam.tokens), list(found.beam.entries)
        request.tokens += tokens
        request.logprobs += entries
        request.finish_reason, request.stop_reason = found.finish_reason, found.stop_reason
        request.last_token = search.engine.clock()
        outputs.append(Output(request, tokens, found.text, entries, found.finish_reason))
    # There are fewer where hardly any token may come.
    outputs += [Output(request, [], "", [], "stop") for request in group[len(best) :]]
    return outputs
