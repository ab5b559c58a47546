"""What answers the questions of a suite: an engine in this process, or any OpenAI-compatible server.

    EngineBackend(model).answer([[{"role": "user", "content": "2 + 2 ="}]], max_tokens=8)
    UrlBackend("http://127.0.0.1:8000/v1")
    CachedBackend(backend, Path("answers.jsonl"))       # what was answered before is not asked again

Answers are greedy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.request import Request, Sampling
from moesaic.train.report.metrics import Journal

if TYPE_CHECKING:
    import httpx

Conversation = Sequence[dict[str, Any]]
OnAnswer = Callable[[int, "Answer"], None]  # the number of a question, and its answer

# How servers report that a conversation is longer than the model's context; there is no one code for it.
TOO_LONG = re.compile(r"context[ _](length|window|size)|the model holds \d+", re.I)


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: int
    out_of_context: bool = False  # the model's context ended before the answer did, or before it began


class Backend(ABC):
    @abstractmethod
    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        """Calls `on_answer` with every answer as it arrives, in any order."""


class EngineBackend(Backend):
    """Keeps its engine: the next turn of a conversation finds the earlier ones in the cache."""

    def __init__(self, model: Model, kv_policy: KVPolicy | None = None) -> None:
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            raise UserError("model", "has no tokenizer with a chat template", "Questions are asked as in a chat.")
        self.model, self.kv_policy = model, kv_policy

    @cached_property
    def engine(self) -> Engine:
        return Engine(self.model, kv_policy=self.kv_policy, seed=0)

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        engine, tokenizer = self.engine, self.model.tokenizer
        assert tokenizer is not None
        max_length = min(self.model.config.context, engine.cache.pages * engine.page_pool.size)
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        running: dict[int, tuple[int, Request]] = {}
        texts: dict[int, str] = {}
        for number, messages in enumerate(conversations):
            prompt = tokenizer.encode(tokenizer.chat([dict(message) for message in messages]), special=False)
            if len(prompt) >= max_length:
                on_answer(number, Answer("", 0, out_of_context=True))
                continue
            request = engine.request(prompt, sampling)
            running[request.number], texts[request.number] = (number, request), ""
        for _, request in running.values():
            engine.add(request)
        try:
            while engine.working:
                for output in engine.step():
                    own = output.request.number
                    texts[own] += output.text
                    if output.finish_reason is not None:
                        written = output.request.written
                        cut = output.finish_reason == "length" and written < max_tokens
                        on_answer(running[own][0], Answer(texts[own], written, out_of_context=cut))
        finally:  # interrupted: the engine is used again later, and must not continue these
            for _, request in running.values():
                engine.abort(request)


class UrlBackend(Backend):
    """`concurrency` questions at a time; a question that fails is asked again twice, unless it was refused."""

    def __init__(self, url: str, name: str | None = None, key: str | None = None, concurrency: int = 8) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.name, self.key, self.concurrency = name, key, concurrency

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        asyncio.run(self._answer(conversations, max_tokens, on_answer))

    def model_name(self) -> str:
        """That of the server's first model, where none was named."""

        async def ask() -> str:
            async with self._client() as client:
                return await self._model_name(client)

        return self.name or asyncio.run(ask())

    async def _model_name(self, client: httpx.AsyncClient) -> str:
        from moesaic.serve.bench.load import first_model

        self.name = self.name or await first_model(client, self.url)
        return self.name

    def _client(self) -> httpx.AsyncClient:
        import httpx

        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.AsyncClient(headers=headers, timeout=600.0)

    async def _answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        import httpx

        from moesaic.serve.bench.load import describe_error

        gate = asyncio.Semaphore(self.concurrency)
        async with self._client() as client:
            name = await self._model_name(client)

            async def ask(number: int, messages: Conversation) -> None:
                form = {"model": name, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
                async with gate:
                    for left in (2, 1, 0):
                        try:
                            response = await client.post(f"{self.url}/chat/completions", json=form)
                            if too_long(response):
                                on_answer(number, Answer("", 0, out_of_context=True))
                                return
                            response.raise_for_status()
                            record = response.json()
                            choice = record["choices"][0]
                            text = plain_text(choice["message"]["content"])
                            tokens = int((record.get("usage") or {}).get("completion_tokens") or 0)
                            cut = choice.get("finish_reason") == "length" and 0 < tokens < max_tokens
                            on_answer(number, Answer(text, tokens, out_of_context=cut))
                            return
                        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
                            if not left or refused(error):
                                problem = f"gave no answer ({describe_error(error)})"
                                raise UserError(self.url, problem, "What was answered is kept with --out.") from None
                            await asyncio.sleep(0.5)

            await asyncio.gather(*(ask(number, messages) for number, messages in enumerate(conversations)))


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


class CachedBackend(Backend):
    """Keeps answers in a file of JSON lines; one that is there is not asked for again."""

    def __init__(self, backend: Backend, file: Path, who: str) -> None:
        self.backend, self.who = backend, who
        self.known: dict[str, Answer] = {}
        self.journal = Journal(file)  # a line that was half written when a run was killed goes first
        if file.exists():
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    record = json.loads(line)
                    self.known[record["question"]] = Answer(record["text"], record["tokens"])
                except (ValueError, LookupError, TypeError):
                    raise UserError(f"{file}:{number}", "is not an answer", "Name another --out.") from None

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        missing: list[int] = []
        keys = [self._key(messages, max_tokens) for messages in conversations]
        for number, key in enumerate(keys):
            if key in self.known:
                on_answer(number, self.known[key])
            else:
                missing.append(number)

        def keep(place: int, answer: Answer) -> None:
            number = missing[place]
            # Else, asked again, it costs little, and a server may have been given a longer context.
            if not answer.out_of_context:
                self.journal.append({"question": keys[number], "text": answer.text, "tokens": answer.tokens})
                self.known[keys[number]] = answer
            on_answer(number, answer)

        if missing:
            self.backend.answer([conversations[number] for number in missing], max_tokens, keep)

    def _key(self, messages: Conversation, max_tokens: int) -> str:
        asked = json.dumps([self.who, [dict(message) for message in messages], max_tokens])
        return hashlib.sha256(asked.encode()).hexdigest()[:32]
