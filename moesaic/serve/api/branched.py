"""`parallel_branches`: a model that was trained to (APAR) writes parts of its answer in parallel.

A stream is in reading order: a branch is streamed as it is written, and what stands behind it when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from moesaic.errors import UserError
from moesaic.serve.api.schema.sampling import GenerationRequest
from moesaic.serve.api.service import Service
from moesaic.serve.core.branches import Branching
from moesaic.serve.core.engine_loop import OutputStream
from moesaic.serve.core.request import Output, Request


class BranchOutputs:
    """Read like the outputs of `requests`, each of which is answered in branches."""

    def __init__(self, service: Service, body: GenerationRequest, requests: Sequence[Request]) -> None:
        assert body.parallel_branches is not None
        if body.use_beam_search:
            raise UserError("parallel_branches", "beams do not branch", "Leave one out.")
        self.service = service
        service.check_count(len(requests) * body.parallel_branches)  # as many as there may be later
        answers = [Branching(service.engine, request, body.parallel_branches) for request in requests]
        self.owners = {one.number: answer for answer in answers for one in answer.requests()}
        self.open = len(answers)
        self.heard: asyncio.Queue[list[Output] | BaseException] = asyncio.Queue()
        self.streams: list[OutputStream] = []
        self.listeners: list[asyncio.Task[None]] = []
        self._submit([one for answer in answers for one in answer.requests()])

    def _submit(self, requests: list[Request]) -> None:
        stream = self.service.submit(requests, again=bool(self.streams))
        self.streams.append(stream)
        self.listeners.append(asyncio.create_task(self._listen(stream)))

    async def _listen(self, stream: OutputStream) -> None:
        try:
            async for batch in stream.batches():
                self.heard.put_nowait(batch)
        except Exception as error:
            self.heard.put_nowait(error)

    async def batches(self) -> AsyncIterator[list[Output]]:
        while self.open:
            heard = await self.heard.get()
            if isinstance(heard, BaseException):
                raise heard
            touched: dict[int, Branching] = {}
            for output in heard:
                answer = self.owners[output.request.number]
                touched[answer.shown.number] = answer
                if begun := answer.take(output):
                    self.owners |= {request.number: answer for request in begun}
                    self._submit(begun)
            read = [answer.read() for answer in touched.values()]
            self.open -= sum(output.finish_reason is not None for output in read)
            if shown := [output for output in read if output.tokens or output.text or output.finish_reason]:
                yield shown

    def close(self) -> None:
        for listener in self.listeners:
            listener.cancel()
        for stream in self.streams:
            stream.close()
