"""Load on a server that speaks OpenAI's API: requests by a Poisson process or a trace, and how the server bore them.

A trace is a JSONL file with a line for each request:

    {"at": 0.52, "prompt": "Tell me ...", "max_tokens": 64}
    {"at": 0.61, "prompt_words": 300, "max_tokens": 16}

`at` is in seconds from the beginning. Requests are sent when they are due, whether or not earlier ones were answered:
a server that cannot keep up is not spared. What a request waits here, before it is sent, counts as the server's.
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
class Ask:
    """A request, and when it is due."""

    at: float
    prompt: str
    max_tokens: int


@dataclass
class Told:
    """What became of a request; times in seconds since it was due."""

    first: float | None = None
    gaps: list[float] = field(default_factory=list)  # between pieces of the answer
    end: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    problem: str | None = None
    said: str = ""  # of a refusal, the server's own words


@dataclass(frozen=True)
class Target:
    """A first token after at most so many seconds, and the others at most so many apart on average."""

    first_token: float = 1.0
    between: float = 0.2

    def met(self, told: Told) -> bool:
        if told.problem is not None or told.first is None:
            return False
        apart = (told.end - told.first) / max(1, told.tokens - 1)
        return told.first <= self.first_token and apart <= self.between


def poisson(count: int, rate: float, words: int, max_tokens: int, seed: int = 0) -> list[Ask]:
    """So many requests, `rate` a second on average, with prompts of half to one and a half times so many words."""
    rng = random.Random(seed)
    now, asks = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        asks.append(Ask(now, some_words(rng, rng.randint(max(1, words // 2), words * 3 // 2)), max_tokens))
    return asks


def read_trace(path: Path, speed: float = 1.0, seed: int = 0) -> list[Ask]:
    """The requests of a trace, `speed` times as fast as it says."""
    rng = random.Random(seed)
    asks = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(path, f"cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"] if "prompt" in entry else some_words(rng, int(entry["prompt_words"]))
            asks.append(Ask(float(entry["at"]) / speed, str(prompt), int(entry.get("max_tokens", 16))))
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = 'Write {"at": seconds, "prompt": "..." or "prompt_words": number, "max_tokens": number}.'
            raise UserError(f"{path}:{number}", "is not a request", remedy) from None
    if not asks:
        raise UserError(path, "holds no requests")
    return sorted(asks, key=lambda ask: ask.at)


def some_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


async def send_all(
    url: str,
    asks: Sequence[Ask],
    *,
    model: str | None = None,
    key: str | None = None,
    seconds: float = 600.0,
    progress: Callable[[int], None] | None = None,
) -> list[Told]:
    """Send every request when it is due; what became of them, in their order."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    url = url.rstrip("/").removesuffix("/v1") + "/v1"
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=seconds) as client:
        model = model or await first_model(client, url)
        began = time.perf_counter()
        done = 0

        async def send(ask: Ask) -> Told:
            nonlocal done
            told = Told()
            await asyncio.sleep(began + ask.at - time.perf_counter())
            try:
                async with asyncio.timeout(seconds):
                    await converse(client, url, model, ask, told, began + ask.at)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                told.problem = f"{type(error).__name__}: {error}".removesuffix(": ")
            told.end = time.perf_counter() - began - ask.at
            done += 1
            if progress is not None:
                progress(done)
            return told

        return await asyncio.gather(*(send(ask) for ask in asks))


async def first_model(client: httpx.AsyncClient, url: str) -> str:
    try:
        answer = await client.get(f"{url}/models")
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        problem = f"names no model ({trouble(error)})"
        raise UserError(f"{url}/models", problem, "Is a server there? If it is, name its model with --model.") from None


def check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that do not close
        fine = False
    if not fine:
        raise UserError(url, "is not the address of a server", "Write http://HOST:PORT or https://HOST.")


def trouble(error: Exception) -> str:
    """What came instead of an answer, in the server's own words where it has any."""
    if not isinstance(error, httpx.HTTPStatusError):
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"HTTP {error.response.status_code}: {words_of(error.response)}"


def words_of(answer: httpx.Response) -> str:
    try:
        said = str(answer.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = answer.reason_phrase
    return said[:200]


async def converse(client: httpx.AsyncClient, url: str, model: str, ask: Ask, told: Told, due: float) -> None:
    form: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": ask.prompt}],
        "max_tokens": ask.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces = 0
    last = 0.0
    ended = False
    async with client.stream("POST", f"{url}/chat/completions", json=form) as answer:
        if answer.status_code != 200:
            await answer.aread()
            told.problem, told.said = f"HTTP {answer.status_code}", words_of(answer)
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data:"):
                continue
            if line.removeprefix("data:").strip() == "[DONE]":
                ended = True
                break
            event = json.loads(line.removeprefix("data:"))
            if "error" in event:
                told.problem = str(event["error"])[:200]
                return
            if usage := event.get("usage"):
                told.prompt_tokens = usage.get("prompt_tokens", 0)
                told.tokens = usage.get("completion_tokens", 0)
            if any(says_something(choice.get("delta") or {}) for choice in event.get("choices", ())):
                now = time.perf_counter() - due
                if told.first is None:
                    told.first = now
                else:
                    told.gaps.append(now - last)
                pieces, last = pieces + 1, now
    if told.first is None and ended:  # a model may end its answer with its first token
        told.first = time.perf_counter() - due
    told.tokens = told.tokens or pieces  # a server that does not count sends a token at a time, most likely
    if not ended:
        told.problem = "the answer broke off"


def says_something(delta: dict[str, Any]) -> bool:
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))


def report(asks: Sequence[Ask], answers: Sequence[Told], target: Target) -> dict[str, Any]:
    """What the server did, in numbers."""
    fine = [told for told in answers if told.problem is None]
    seconds = max((ask.at + told.end for ask, told in zip(asks, answers)), default=0.0) or 1e-9
    met = sum(target.met(told) for told in answers)
    problems: dict[str, int] = {}
    said: dict[str, str] = {}  # the first words of each
    for told in answers:
        if told.problem is not None:
            problems[told.problem] = problems.get(told.problem, 0) + 1
            said.setdefault(told.problem, told.said)
    return {
        "requests": len(asks),
        "failed": len(answers) - len(fine),
        "problems": problems,
        "said": {problem: words for problem, words in said.items() if words},
        "seconds": seconds,
        "offered_per_second": len(asks) / (asks[-1].at or 1e-9) if asks else 0.0,
        "requests_per_second": len(fine) / seconds,
        "prompt_tokens_per_second": sum(told.prompt_tokens for told in fine) / seconds,
        "tokens_per_second": sum(told.tokens for told in fine) / seconds,
        "first_token_seconds": percentiles([told.first for told in fine if told.first is not None]),
        "inter_token_seconds": percentiles([gap for told in fine for gap in told.gaps]),
        "request_seconds": percentiles([told.end for told in fine]),
        "goodput": {
            "first_token_target": target.first_token,
            "inter_token_target": target.between,
            "share": met / len(asks) if asks else 0.0,
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
