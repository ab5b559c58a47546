"""Load on an OpenAI-compatible server: Poisson arrivals or a trace, and the throughput, latencies and goodput under it.

A trace is a JSONL file with a line for each request:

    {"at": 0.52, "prompt": "Tell me ...", "max_tokens": 64}
    {"at": 0.61, "prompt_words": 300, "max_tokens": 16}

`at` is in seconds from the start. Requests are sent when they are due, whether or not earlier ones are complete.
Time that a request waits here, before it is sent, counts as the server's.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from moesaic.errors import UserError

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "hand")


@dataclass(frozen=True)
class LoadRequest:
    """A request, and when it is sent."""

    at: float
    prompt: str
    max_tokens: int


@dataclass
class RequestResult:
    """What came of a request; times in seconds since it was due."""

    ttft: float | None = None
    inter_token: list[float] = field(default_factory=list)  # between chunks of the stream
    latency: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    problem: str | None = None
    message: str = ""  # the server's, where it refused the request


@dataclass(frozen=True)
class Target:
    """What counts as goodput: at most so many seconds to the first token (TTFT), and between tokens (TPOT)."""

    first_token: float = 1.0
    between: float = 0.2

    def met(self, result: RequestResult) -> bool:
        if result.problem is not None or result.ttft is None:
            return False
        between = (result.latency - result.ttft) / max(1, result.tokens - 1)
        return result.ttft <= self.first_token and between <= self.between


def poisson(count: int, rate: float, words: int, max_tokens: int, seed: int = 0) -> list[LoadRequest]:
    """Poisson arrivals at `rate` a second; prompts have half to one and a half times so many words."""
    rng = random.Random(seed)
    now, requests = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        requests.append(
            LoadRequest(now, random_words(rng, rng.randint(max(1, words // 2), words * 3 // 2)), max_tokens)
        )
    return requests


def read_trace(path: Path, speed: float = 1.0, seed: int = 0) -> list[LoadRequest]:
    """The requests of a trace, `speed` times as fast."""
    rng = random.Random(seed)
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"] if "prompt" in entry else random_words(rng, int(entry["prompt_words"]))
            requests.append(LoadRequest(float(entry["at"]) / speed, str(prompt), int(entry.get("max_tokens", 16))))
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = 'Write {"at": seconds, "prompt": "..." or "prompt_words": number, "max_tokens": number}.'
            raise UserError(f"{path}:{number}", "is not a request", remedy) from None
    if not requests:
        raise UserError(path, "holds no requests")
    return sorted(requests, key=lambda request: request.at)


def random_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


async def send_all(
    url: str,
    requests: Sequence[LoadRequest],
    *,
    model: str | None = None,
    key: str | None = None,
    seconds: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> list[RequestResult]:
    """Send every request when it is due; the results are in the order of the requests."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    url = url.rstrip("/").removesuffix("/v1") + "/v1"
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=seconds) as client:
        model = model or await first_model(client, url)
        start = time.perf_counter()
        done = 0

        async def send(request: LoadRequest) -> RequestResult:
            nonlocal done
            result = RequestResult()
            await asyncio.sleep(start + request.at - time.perf_counter())
            try:
                async with asyncio.timeout(seconds):
                    await stream_chat(client, url, model, request, result, start + request.at)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                result.problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            result.latency = time.perf_counter() - start - request.at
            done += 1
            if progress is not None:
                progress(done)
            return result

        return await asyncio.gather(*(send(request) for request in requests))


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        response = await client.get(f"{url}/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        problem = f"names no model ({describe_error(error)})"
        raise UserError(f"{url}/models", problem, "Is a server there? If it is, name its model with --model.") from None


def check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not close
        fine = False
    if not fine:
        raise UserError(url, "is not the address of a server", "Write http://HOST:PORT or https://HOST.")


def describe_error(error: Exception) -> str:
    """An error of the connection or of the server, with the message it sent."""
    if not isinstance(error, httpx.HTTPStatusError):
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"HTTP {error.response.status_code}: {error_message(error.response)}"


def error_message(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.reason_phrase
    return message[:200]


async def stream_chat(
    client: httpx.AsyncClient, url: str, model: str, request: LoadRequest, result: RequestResult, due: float
) -> None:
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": request.prompt}],
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces = 0
    last = 0.0
    ended = False
    async with client.stream("POST", f"{url}/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            result.problem, result.message = f"HTTP {response.status_code}", error_message(response)
            return
        async for line in response.aiter_lines():
            if not line.startswith("data:"):
                continue
            if line.removeprefix("data:").strip() == "[DONE]":
                ended = True
                break
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                result.problem = str(event["error"])[:200]
                return
            if usage := event.get("usage"):
                result.prompt_tokens = usage.get("prompt_tokens", 0)
                result.tokens = usage.get("completion_tokens", 0)
            if any(has_text(choice.get("delta") or {}) for choice in event.get("choices", ())):
                now = time.perf_counter() - due
                if result.ttft is None:
                    result.ttft = now
                else:
                    result.inter_token.append(now - last)
                pieces, last = pieces + 1, now
    if result.ttft is None and ended:  # the first token may be the end of the completion
        result.ttft = time.perf_counter() - due
    result.tokens = result.tokens or pieces  # without usage: one token in each chunk, most likely
    if not ended:
        result.problem = "the stream broke off"


def has_text(delta: dict[str, Any]) -> bool:
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def report(requests: Sequence[LoadRequest], results: Sequence[RequestResult], target: Target) -> dict[str, Any]:
    """Throughput, latency percentiles and goodput."""
    fine = [result for result in results if result.problem is None]
    seconds = max((request.at + result.latency for request, result in zip(requests, results)), default=0.0) or 1e-9
    met = sum(target.met(result) for result in results)
    problems: dict[str, int] = {}
    messages: dict[str, str] = {}  # the first of each problem
    for result in results:
        if result.problem is not None:
            problems[result.problem] = problems.get(result.problem, 0) + 1
            messages.setdefault(result.problem, result.message)
    return {
        "requests": len(requests),
        "failed": len(results) - len(fine),
        "problems": problems,
        "said": {problem: message for problem, message in messages.items() if message},
        "seconds": seconds,
        "offered_per_second": len(requests) / (requests[-1].at or 1e-9) if requests else 0.0,
        "requests_per_second": len(fine) / seconds,
        "prompt_tokens_per_second": sum(result.prompt_tokens for result in fine) / seconds,
        "tokens_per_second": sum(result.tokens for result in fine) / seconds,
        "first_token_seconds": percentiles([result.ttft for result in fine if result.ttft is not None]),
        "inter_token_seconds": percentiles([gap for result in fine for gap in result.inter_token]),
        "request_seconds": percentiles([result.latency for result in fine]),
        "goodput": {
            "first_token_target": target.first_token,
            "inter_token_target": target.between,
            "share": met / len(requests) if requests else 0.0,
            "requests_per_second": met / seconds,
        },
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = np.percentile(values, [50, 90, 95, 99])
    return (
        {"mean": float(np.mean(values))}
        | dict(zip(("p50", "p90", "p95", "p99"), found.tolist()))
        | {"max": max(values)}
    )
