"""Outputs are read one by one or in batches, and an error comes after what came before it."""

from __future__ import annotations

import asyncio

import pytest

from moesaic.serve.core.engine_loop import EngineFailed, OutputStream
from moesaic.serve.core.request import Output, Request


class Submitted:
    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.aborted: list[int] = []

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.number)

    def abort(self, request: Request) -> None:
        self.aborted.append(request.number)


def output(request: Request, token: int, finish_reason: str | None = None) -> Output:
    return Output(request, [token], str(token), [], finish_reason)


async def texts(stream: OutputStream) -> list[list[str]]:
    return [[one.text for one in batch] async for batch in stream.batches()]


def test_a_batch_is_all_that_has_come_since() -> None:
    async def read() -> None:
        loop, first, second = Submitted(), Request([1]), Request([2])
        stream = OutputStream(loop, [first, second], None)
        for one in (output(first, 1), output(second, 2, "stop"), output(first, 3)):
            stream.queue.put_nowait(one)
        reading = asyncio.create_task(texts(stream))
        await asyncio.sleep(0)
        stream.queue.put_nowait(output(first, 4, "length"))
        assert await reading == [["1", "2", "3"], ["4"]]
        assert loop.forgotten == [second.number, first.number] and not stream.waiting
        stream.close()
        assert not loop.aborted

    asyncio.run(read())


@pytest.mark.parametrize("problem, raised", [(EngineFailed("it failed"), EngineFailed), (ValueError(), EngineFailed)])
def test_what_came_before_an_error_is_still_read(problem: Exception, raised: type[Exception]) -> None:
    async def read() -> None:
        loop, request = Submitted(), Request([1])
        stream = OutputStream(loop, [request], None)
        stream.queue.put_nowait(output(request, 1))
        stream.queue.put_nowait(problem)
        batches = stream.batches()
        assert [one.text for one in await anext(batches)] == ["1"]
        with pytest.raises(raised):
            await anext(batches)
        stream.close()
        assert loop.aborted == [request.number]

    asyncio.run(read())


@pytest.mark.parametrize("batched", [True, False])
def test_time_that_is_up_ends_it(batched: bool) -> None:
    async def read() -> None:
        loop, request = Submitted(), Request([1])
        stream = OutputStream(loop, [request], 0.0)
        with pytest.raises(TimeoutError):
            await (anext(stream.batches()) if batched else anext(stream))
        stream.close()
        assert loop.aborted == [request.number]

    asyncio.run(read())
