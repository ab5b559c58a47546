"""What one API key may use, and what it has used: requests and tokens a minute, requests at the same time.

A limit a minute is a bucket that is full at first and fills up again evenly, so that a client that kept below it for a
while may send a burst. Tokens are known only when they are there: those of a prompt are taken when it is submitted,
generated ones as they come, and a key whose bucket has run dry waits until it is above zero again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from moesaic.serve.api.errors import ApiError

MINUTE = 60.0


@dataclass(frozen=True)
class KeyLimits:
    """None: no limit."""

    rpm: int | None = None  # requests a minute
    tpm: int | None = None  # tokens a minute, of prompts and completions
    concurrent: int | None = None  # requests at the same time


class Bucket:
    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self.capacity = capacity
        self.clock = clock
        self.level = float(capacity)
        self.filled = clock()

    def fill(self) -> float:
        now = self.clock()
        self.level = min(float(self.capacity), self.level + (now - self.filled) * self.capacity / MINUTE)
        self.filled = now
        return self.level

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.fill()) * MINUTE / self.capacity)


class KeyUse:
    """Of one key, by its name. Requests begin and end on the event loop; tokens come on the engine's thread."""

    def __init__(self, name: str, limits: KeyLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self.requests = None if limits.rpm is None else Bucket(limits.rpm, clock)
        self.tokens = None if limits.tpm is None else Bucket(limits.tpm, clock)
        self.running = 0
        self.statuses: Counter[int] = Counter()  # responses, by their status
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Count a request, or refuse it."""
        with self._lock:
            limit = self.limits.concurrent
            if limit is not None and self.running >= limit:
                raise self._refused(f"{limit} requests at the same time", "concurrent_requests", 1.0)
            if self.tokens is not None and self.tokens.fill() <= 0:
                text = f"{self.tokens.capacity} tokens a minute"
                raise self._refused(text, "tokens_per_minute", self.tokens.seconds_until(1.0))
            if self.requests is not None:
                if self.requests.fill() < 1:
                    text = f"{self.requests.capacity} requests a minute"
                    raise self._refused(text, "requests_per_minute", self.requests.seconds_until(1.0))
                self.requests.level -= 1
            self.running += 1

    def stay(self) -> None:
        """A request goes on when its HTTP request has ended."""
        with self._lock:
            self.running += 1

    def end(self) -> None:
        with self._lock:
            self.running -= 1

    def use(self, prompt: int = 0, generated: int = 0) -> None:
        with self._lock:
            self.prompt_tokens += prompt
            self.generated_tokens += generated
            if self.tokens is not None:
                self.tokens.fill()
                self.tokens.level -= prompt + generated

    def headers(self) -> dict[str, str]:
        """As OpenAI's API says what is left."""
        found: dict[str, str] = {}
        with self._lock:
            for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
                if bucket is not None:
                    found[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
                    found[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.fill())))
                    found[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.capacity):.3f}s"
        return found

    def _refused(self, limit: str, code: str, seconds: float) -> ApiError:
        message = f"this API key may use {limit}, and has"
        return ApiError(429, message, code=code, headers={"retry-after": str(max(1, math.ceil(seconds)))})


# Whose request is being answered; None: a server without keys.
CALLER: ContextVar[KeyUse | None] = ContextVar("CALLER", default=None)
