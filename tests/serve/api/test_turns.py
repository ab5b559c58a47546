"""A burst of requests is begun a few at a time, in the order in which it came, and streams go on in between."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from moesaic.serve.api.middleware import Turns
from moesaic.serve.api.stream import LIGHT_BYTES, is_light


def test_no_more_than_some_begin_in_one_pass_of_the_event_loop() -> None:
    async def burst() -> list[list[int]]:
        turns = Turns(together=3)
        passes: list[list[int]] = [[]]

        async def begin(number: int) -> None:
            await turns.wait()
            passes[-1].append(number)

        tasks = [asyncio.create_task(begin(number)) for number in range(10)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            passes.append([])
        return passes

    passes = [some for some in asyncio.run(burst()) if some]
    assert max(map(len, passes)) <= 3
    assert [number for some in passes for number in some] == list(range(10))


def test_one_alone_does_not_wait() -> None:
    async def alone() -> None:
        waiting = Turns().wait()
        with pytest.raises(StopIteration):
            waiting.send(None)  # it ends without a pause

    asyncio.run(alone())


@pytest.mark.parametrize(
    "fields, size, light",
    [
        ({"prompt": "a"}, 100, True),
        ({"prompt": "a" * 9000}, 9000, False),
        ({"prompt": [1] * 5000}, 20_000, True),
        ({"prompt": ["a", "b"]}, LIGHT_BYTES + 1, False),
        ({"messages": []}, 100, True),
        ({"messages": [], "tools": []}, 100, False),
        ({"prompt": "a", "guided_regex": "(a|b)*"}, 100, False),
        ({"prompt": [1], "response_format": {}}, 100, False),
    ],
)
def test_what_is_prepared_at_once(fields: dict[str, object], size: int, light: bool) -> None:
    assert is_light(SimpleNamespace(**fields), size) is light
