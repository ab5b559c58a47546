"""A client of any OpenAI-compatible server, for programs that have many conversations answered.

    client = ChatClient("http://127.0.0.1:8000")
    client.ask_all([([{"role": "user", "content": "2 + 2 ="}], {"max_tokens": 8})], on_reply)

What fails is tried again, unless the server refused it: then it would refuse it again.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moesaic.errors import UserError

if TYPE_CHECKING:
    import httpx

Messages = Sequence[Mapping[str, Any]]

# How servers report that a conversation is longer than the model's context; there is no one code for it.
TOO_LONG = re.compile(r"context[ _](length|window|size)|the model holds \d+", re.I)
ATTEMPTS = 3
PAUSE = 0.5  # seconds before the second attempt; doubled before the third


@dataclass(frozen=True)
class Reply:
    text: str
    tokens: int = 0
    finish_reason: str | None = None
    too_long: bool = False  # the conversation does not fit into the model's context


class Refused(UserError):
    """The server would not answer this, now or later. `message` is its own."""

    def __init__(self, place: object, problem: str, remedy: str = "", message: str = "", status: int = 0) -> None:
        super().__init__(place, problem, remedy)
        self.message, self.status = message, status


class ChatClient:
    """`concurrency` conversations at a time. `remedy` is what a user can do where no answer comes."""

    def __init__(
        self,
        url: str,
        name: str | None = None,
        key: str | None = None,
        concurrency: int = 8,
        remedy: str = "Is the server there, and is it the right one?",
        seconds: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.name, self.key, self.concurrency = name, key, concurrency
        self.remedy, self.seconds = remedy, seconds

    def open(self) -> httpx.AsyncClient:
        import httpx  # takes a while to import

        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.AsyncClient(headers=headers, timeout=self.seconds)

    def model_name(self) -> str:
        """That of the server's first model, where none was named."""

        async def ask() -> str:
            async with self.open() as client:
                return await self._model_name(client)

        return self.name or asyncio.run(ask())

    def ask_all(
        self, asked: Sequence[tuple[Messages, Mapping[str, Any]]], on_reply: Callable[[int, Reply], None]
    ) -> None:
        """Each conversation with the other fields of its request; replies in the order in which they come."""
        asyncio.run(self._ask_all(asked, on_reply))

    async def _model_name(self, client: httpx.AsyncClient) -> str:
        from moesaic.serve.bench.load import first_model

        self.name = self.name or await first_model(client, self.url)
        return self.name

    async def _ask_all(
        self, asked: Sequence[tuple[Messages, Mapping[str, Any]]], on_reply: Callable[[int, Reply], None]
    ) -> None:
        gate = asyncio.Semaphore(self.concurrency)
        async with self.open() as client:
            name = await self._model_name(client)

            async def ask(number: int, messages: Messages, fields: Mapping[str, Any]) -> None:
                async with gate:
                    body = {"model": name, "messages": [dict(message) for message in messages], **fields}
                    on_reply(number, await self._ask(client, body))

            tasks = [asyncio.ensure_future(ask(number, *one)) for number, one in enumerate(asked)]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:  # one failed: what the others would say is not waited for
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
        import httpx

        from moesaic.serve.bench.load import describe_error, error_message

        for attempt in range(ATTEMPTS):
            try:
                response = await client.post(f"{self.url}/chat/completions", json=body)
                if too_long(response):
                    return Reply("", too_long=True)
                response.raise_for_status()
                record = response.json()
                choice = record["choices"][0]
                text = plain_text(choice["message"]["content"])
                tokens = int((record.get("usage") or {}).get("completion_tokens") or 0)
                return Reply(text, tokens, choice.get("finish_reason"))
            except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
                problem = f"gave no answer ({describe_error(error)})"
                if refused(error):
                    sent = getattr(error, "response")  # noqa: B009 — an error of a status has one
                    raise Refused(self.url, problem, self.remedy, error_message(sent), sent.status_code) from None
                if attempt == ATTEMPTS - 1:
                    raise UserError(self.url, problem, self.remedy) from None
                await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")


def plain_text(content: Any) -> str:
    """What a message says, as text or in parts of text. Half a surrogate pair can be neither judged nor kept."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    text = "".join(part["text"] for part in parts if part.get("type") == "text")
    return text.encode("utf-8", "replace").decode()


def refused(error: Exception) -> bool:
    """Whether a server would give the same error if it were asked again."""
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return 400 <= status < 500 and status not in (408, 409, 425, 429)


def too_long(response: httpx.Response) -> bool:
    return response.status_code in (400, 413) and TOO_LONG.search(response.text[:2000]) is not None
