"""What answers the questions of a suite: an engine in this process, or any OpenAI-compatible server.

    EngineBackend(model).answer([[{"role": "user", "content": "2 + 2 ="}]], max_tokens=8)
    UrlBackend("http://127.0.0.1:8000/v1")
    CachedBackend(backend, Path("answers.jsonl"))       # what was answered before is not asked again

Answers are greedy.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.chat_client import ChatClient, Reply
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.request import Request, Sampling
from moesaic.train.report.metrics import Journal
from moesaic.worlds.completions import prompt_tokens

Conversation = Sequence[dict[str, Any]]
OnAnswer = Callable[[int, "Answer"], None]  # the number of a question, and its answer


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
            prompt = prompt_tokens(tokenizer, messages)
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
        self.client = ChatClient(url, name, key, concurrency, remedy="What was answered is kept with --out.")

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, on_answer: OnAnswer) -> None:
        def tell(number: int, reply: Reply) -> None:
            cut = reply.finish_reason == "length" and 0 < reply.tokens < max_tokens
            on_answer(number, Answer(reply.text, reply.tokens, out_of_context=cut or reply.too_long))

        form = {"max_tokens": max_tokens, "temperature": 0}
        self.client.ask_all([(messages, form) for messages in conversations], tell)

    def model_name(self) -> str:
        """That of the server's first model, where none was named."""
        return self.client.model_name()


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
