"""Ask a model behind any OpenAI-compatible URL, with patience: time limits, and another try where that may help."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import httpx

AGAIN = {408, 409, 425, 429, 500, 502, 503, 504}  # answers that another try may better


@dataclass(frozen=True)
class Endpoint:
    url: str  # with its version, as in http://localhost:8000/v1
    model: str
    key_variable: str | None  # the NAME of the environment variable that holds the secret
    seconds: float  # for each try
    retries: int

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url must begin with http:// or https://, not {self.url!r}")
        if self.seconds <= 0 or self.retries < 0:
            raise ValueError("seconds must be above 0, and retries at least 0")
        if self.key_variable is not None and not os.environ.get(self.key_variable):
            raise ValueError(f"the environment variable {self.key_variable} is not set")

    def ask(self, prompt: str, max_tokens: int, temperature: float) -> str:
        """What the model says. The secret is read when it is needed, kept nowhere, and in no message."""
        secret = os.environ.get(self.key_variable, "") if self.key_variable else ""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.encode("utf-8", "replace").decode()}],
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        problem = ""
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(min(30.0, 0.5 * 2**attempt) * random.uniform(0.5, 1.0))  # not all at the same moment
            try:
                reply = httpx.post(
                    f"{self.url.rstrip('/')}/chat/completions",
                    json=body,
                    headers={"Authorization": f"Bearer {secret}"} if secret else {},
                    timeout=self.seconds,
                )
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__} {error}".strip()
                continue
            if reply.status_code == 200:
                return _content(reply)
            problem = f"HTTP {reply.status_code}"
            if reply.status_code not in AGAIN:
                break
        raise ConnectionError(f"{self.url} gave no answer: {problem}".replace(secret or "\0", "***"))


def _content(reply: httpx.Response) -> str:
    try:
        content = reply.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConnectionError("the reply is not a chat completion") from error
    if not isinstance(content, str) or not content.strip():
        raise ConnectionError("the model said nothing")
    return content
