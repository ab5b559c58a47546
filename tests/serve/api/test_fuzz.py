"""Malformed, huge, slow and abandoned requests, many at a time: no server error, no leak, no hang.

`python -m tests.serve.api.test_fuzz 5000` sends as many as you like.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from moesaic.serve.core.engine import Engine
from tests.serve.api.running import NAME, Running, running
from tests.waiting import PATIENCE

TALK: Any = {"model": NAME, "messages": [{"role": "user", "content": "yes or no"}], "max_tokens": 8}
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
}
GOOD: list[tuple[str, Any]] = [
    ("/v1/chat/completions", TALK),
    ("/v1/chat/completions", TALK | {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", TALK | {"tools": [TOOL], "tool_choice": "required", "stream": True}),
    ("/v1/chat/completions", TALK | {"response_format": {"type": "json_object"}, "prompt_logprobs": 1}),
    ("/v1/chat/completions", TALK | {"guided_regex": "[ab]{2,5}", "min_tokens": 6, "stop": ["a"], "top_k": 3}),
    ("/v1/chat/completions", TALK | {"guided_choice": ["left", "right"], "temperature": 0.0, "min_p": 0.5}),
    ("/v1/chat/completions", TALK | {"logit_bias": {"5": -100, "6": 100}, "frequency_penalty": 2, "seed": -1}),
    ("/v1/completions", {"prompt": ["yes", "no"], "max_tokens": 6, "n": 2, "best_of": 3, "logprobs": 3, "echo": True}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4]], "max_tokens": 30, "stream": True, "ignore_eos": True}),
    ("/v1/responses", {"input": "yes", "max_output_tokens": 6, "stream": True, "temperature": 2.0}),
    ("/v1/responses", {"input": [{"role": "user", "content": "no"}], "max_output_tokens": 4, "top_logprobs": 1}),
    ("/v1/embeddings", {"input": ["yes", "no, or a number"]}),
    ("/v1/embeddings", {"input": [[1, 2]], "dimensions": 4, "pooling": "last", "truncate_prompt_tokens": 1}),
    ("/v1/rerank", {"query": "yes", "documents": ["no", {"text": "a"}], "top_n": 1, "max_tokens_per_doc": 2}),
    ("/v1/score", {"text_1": "yes", "text_2": ["no"], "scoring": "generative", "labels": ["a", "b"]}),
    ("/v1/score", {"query": "yes", "items": ["no"], "label_token_ids": [5, 6], "apply_softmax": True}),
    ("/pooling", {"input": "yes", "pooling": "none", "normalize": True}),
    ("/completion", {"prompt": ["yes", [1, "no"]], "n_predict": 4, "n_probs": 2, "post_sampling_probs": True}),
    ("/completion", {"prompt": "yes", "n_predict": 6, "stream": True, "logit_bias": [[5, -1], ["a", False]]}),
    (
        "/completion",
        {"prompt": {"prompt_string": "a"}, "n_predict": 0, "response_fields": ["a/b", "content"], "lora": []},
    ),
    ("/infill", {"input_prefix": "yes", "input_suffix": [1, "no"], "input_extra": [{"text": "a"}], "n_predict": 2}),
    ("/embedding", {"content": ["yes", [1, "no"]], "embd_normalize": 1}),
    ("/api/chat", {"model": NAME, "messages": [{"role": "user", "content": "a"}], "options": {"num_predict": 4}}),
    ("/api/chat", {"model": NAME, "messages": [{"role": "tool", "tool_name": "f"}], "tools": [TOOL], "stream": False}),
    (
        "/api/generate",
        {"model": NAME, "prompt": "a", "context": [1, 2], "options": {"num_predict": 2}, "format": "json"},
    ),
    ("/api/generate", {"model": NAME, "prompt": "a", "raw": True, "options": {"num_predict": 2}, "logprobs": True}),
    ("/api/embed", {"model": NAME, "input": ["a", "b"], "dimensions": 3}),
    ("/api/show", {"model": NAME}),
    ("/tokenize", {"prompt": "a number", "return_token_strs": True}),
    ("/detokenize", {"tokens": [1, 99, 300]}),
]
ODD: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, "", "x", "\x00", "😀" * 50, "a" * 5000, [], [[]],
    [None], {}, {"a": {"b": []}}, [0] * 1000, ["<|endoftext|>"], "<|assistant|>", "{{ 7*7 }}", "(", "start: start",
    {"type": "object", "properties": {"x": {"$ref": "#"}}}, {"$ref": "https://example.invalid/x"}, "(a|a)*b{1000}",
]  # fmt: skip
RAW = [b"", b"{", b"\xff" * 100, b"[" * 5000, b"GET / HTTP/1.1\r\n\r\n", b'{"messages":1e999}', b'"' + b"a" * 10000]


def changed(body: Any, chance: random.Random) -> Any:
    """A copy with some part of it replaced, removed or added."""
    body = copy.deepcopy(body)
    at, way = body, []
    while isinstance(at, dict | list) and at and (not way or chance.random() < 0.6):
        key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
        way.append((at, key))
        at = at[key]
    if not way:
        return chance.choice(ODD)
    holder, key = chance.choice(way)
    match chance.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(FIELDS)] = chance.choice(ODD)
        case _:
            holder[key] = chance.choice(ODD)
    return body


MORE = (
    "guided_grammar guided_json structured_outputs priority deadline_ms cache_salt chat_template_kwargs stream_options"
)
FIELDS = sorted({key for _, body in GOOD for key in body} | {*MORE.split(), "stop_token_ids", "top_p"})


async def slowly(body: bytes, chance: random.Random) -> AsyncIterator[bytes]:
    for start in range(0, len(body), max(1, len(body) // 3)):
        await asyncio.sleep(chance.random() * 0.02)
        yield body[start : start + max(1, len(body) // 3)]


async def one(client: httpx.AsyncClient, chance: random.Random) -> str:
    """One request of some kind, and what came of it."""
    path, body = chance.choice(GOOD)
    kind = chance.choice(["good", "changed", "changed", "changed", "left", "left", "slow", "raw", "huge"])
    content: Any = json.dumps(changed(body, chance) if kind == "changed" else body)
    if kind == "slow":
        content = slowly(content.encode(), chance)
    elif kind == "raw":
        content = chance.choice(RAW)
    elif kind == "huge":
        content = json.dumps(body | {"user": "x" * chance.choice([10_000, 200_000])})
    headers = {"content-type": "application/json"}
    try:
        async with client.stream("POST", path, content=content, headers=headers) as answer:
            if kind == "left":
                await asyncio.sleep(chance.random() * 0.03)
                return "left"
            text = (await answer.aread()).decode()
    except (httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):
        assert kind == "huge"  # the server hung up on it
        return "cut"
    if kind in ("good", "slow"):
        assert answer.status_code in (200, 429, 501), (path, body, text)
    assert answer.status_code < 500 or answer.status_code == 501, (path, content, text)
    assert "server_error" not in text, (path, content, text)
    if answer.status_code != 200:
        assert in_form(path, json.loads(text)["error"]), (path, text)
    return str(answer.status_code)


def in_form(path: str, error: Any) -> bool:
    """Whether an error is written as its dialect has it."""
    if path.startswith("/api/"):
        return isinstance(error, str)
    native = path in ("/completion", "/infill", "/embedding")
    return set(error) == ({"code", "message", "type"} if native else {"message", "type", "param", "code"})


async def crowd(server: Running, count: int, seed: int) -> Counter[str]:
    results: Counter[str] = Counter()
    places = asyncio.Semaphore(24)

    async def guarded(number: int) -> None:
        chance = random.Random(seed * 1_000_003 + number)
        async with places:
            limit = chance.choice([PATIENCE, PATIENCE, PATIENCE, 0.05])  # some give up waiting
            async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE, verify=False) as client:
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit):
                        results[await one(client, chance)] += 1
                        return
                assert limit < 1, "it hangs"
                results["gave up"] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(guarded(number))
    return results


def attack(engine: Engine, count: int, seed: int = 0) -> Counter[str]:
    with running(engine, max_body=100_000, max_queue=8, request_seconds=PATIENCE) as server:
        results = asyncio.run(crowd(server, count, seed))
        server.until(lambda: server.idle)
        assert server.post("/v1/chat/completions", TALK).status_code == 200
        free, idle = engine.page_pool.free, engine.page_pool.idle
        assert len(free) + idle == engine.cache.pages
        assert len(set(free)) == len(free)
    return results


def test_nothing_a_client_sends_is_a_server_error(new_engine: Callable[..., Engine]) -> None:
    results = attack(new_engine(max_requests=8, cache_bytes=1 << 20), 200)
    assert results["200"] > 30
    assert results["400"] > 20
    assert results["left"] + results["gave up"] > 15
    assert results["413"] + results["cut"] > 0


if __name__ == "__main__":
    import tempfile

    import moesaic
    from tests.serve.made import talking_model

    model = moesaic.load(talking_model(Path(tempfile.mkdtemp()) / NAME), threads=1)
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(
        attack(
            moesaic.Engine(model, cache_bytes=1 << 20, max_requests=8),
            size,
            seed=int(sys.argv[2]) if sys.argv[2:] else 1,
        )
    )
