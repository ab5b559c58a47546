"""Who answers the questions of a suite: an engine in this process, or any server that speaks OpenAI's protocol.

    EngineSpeaker(model).answer([[{"role": "user", "content": "2 + 2 ="}]], max_tokens=8)
    UrlSpeaker("http://127.0.0.1:8000/v1")
    Remembering(speaker, Path("answers.jsonl"))       # what was answered before is not asked again

Answers are greedy.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.model.transformer import Model
from moesaic.serve.engine import Engine
from moesaic.serve.kv_policies import KVPolicy
from moesaic.serve.request import Sampling
from moesaic.train.metrics import Journal

Conversation = Sequence[dict[str, Any]]
Heard = Callable[[int, "Said"], None]  # the number of a question, and its answer


@dataclass(frozen=True)
class Said:
    text: str
    tokens: int


class Speaker(ABC):
    @abstractmethod
    def answer(self, conversations: Sequence[Conversation], max_tokens: int, heard: Heard) -> None:
        """Calls `heard` with every answer as it is there, in any order."""


class EngineSpeaker(Speaker):
    def __init__(self, model: Model, kv_policy: KVPolicy | None = None) -> None:
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            raise UserError("model", "has no tokenizer with a chat template", "Questions are asked as in a chat.")
        self.model, self.kv_policy = model, kv_policy

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, heard: Heard) -> None:
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        engine = Engine(self.model, kv_policy=self.kv_policy, seed=0)
        wishes = Sampling(max_tokens=max_tokens, temperature=0.0)
        numbers, said = {}, {}
        for number, messages in enumerate(conversations):
            text = tokenizer.chat([dict(message) for message in messages])
            request = engine.request(tokenizer.encode(text, special=False), wishes)
            numbers[request.number], said[request.number] = number, ""
            engine.add(request)
        while engine.working:
            for output in engine.step():
                own = output.request.number
                said[own] += output.text
                if output.finish_reason is not None:
                    heard(numbers[own], Said(said[own], output.request.written))


class UrlSpeaker(Speaker):
    """`together` questions at a time; a question that fails is asked again twice."""

    def __init__(self, url: str, name: str | None = None, key: str | None = None, together: int = 8) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.name, self.key, self.together = name, key, together

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, heard: Heard) -> None:
        asyncio.run(self._answer(conversations, max_tokens, heard))

    async def _answer(self, conversations: Sequence[Conversation], max_tokens: int, heard: Heard) -> None:
        import httpx

        from moesaic.serve.load import first_model

        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        gate = asyncio.Semaphore(self.together)
        async with httpx.AsyncClient(headers=headers, timeout=600.0) as client:
            name = self.name or await first_model(client, self.url)

            async def ask(number: int, messages: Conversation) -> None:
                form = {"model": name, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0}
                async with gate:
                    for left in (2, 1, 0):
                        try:
                            answer = await client.post(f"{self.url}/chat/completions", json=form)
                            answer.raise_for_status()
                            told = answer.json()
                            text = told["choices"][0]["message"]["content"] or ""
                            heard(number, Said(text, int((told.get("usage") or {}).get("completion_tokens", 0))))
                            return
                        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                            if not left:
                                problem = f"gave no answer ({type(error).__name__}: {error})"
                                raise UserError(self.url, problem, "What was answered is kept with --out.") from None
                            await asyncio.sleep(0.5)

            await asyncio.gather(*(ask(number, messages) for number, messages in enumerate(conversations)))


class Remembering(Speaker):
    """Keeps answers in a file of JSON lines; one that is there is not asked for again."""

    def __init__(self, speaker: Speaker, file: Path, who: str) -> None:
        self.speaker, self.who = speaker, who
        self.known: dict[str, Said] = {}
        if file.exists():
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                try:
                    told = json.loads(line)
                    self.known[told["question"]] = Said(told["text"], told["tokens"])
                except (ValueError, LookupError, TypeError):
                    raise UserError(f"{file}:{number}", "is not an answer", "Name another --out.") from None
        self.journal = Journal(file)

    def answer(self, conversations: Sequence[Conversation], max_tokens: int, heard: Heard) -> None:
        missing: list[int] = []
        keys = [self._key(messages, max_tokens) for messages in conversations]
        for number, key in enumerate(keys):
            if key in self.known:
                heard(number, self.known[key])
            else:
                missing.append(number)

        def keep(place: int, said: Said) -> None:
            number = missing[place]
            self.journal.append({"question": keys[number], **asdict(said)})
            heard(number, said)

        if missing:
            self.speaker.answer([conversations[number] for number in missing], max_tokens, keep)

    def _key(self, messages: Conversation, max_tokens: int) -> str:
        asked = json.dumps([self.who, [dict(message) for message in messages], max_tokens])
        return hashlib.sha256(asked.encode()).hexdigest()[:32]
