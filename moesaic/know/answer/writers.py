"""Writers: an engine in this process, or any OpenAI-compatible server.

    EngineWriter(moesaic.load("MODEL")).write([[{"role": "user", "content": "Name a river."}]], max_tokens=16)
    ServerWriter("http://127.0.0.1:8000").write(conversations, max_tokens=64, form=Form(schema={...}))

All conversations of a call are one batch. What they have in common at their beginning is computed once, so what is the
same in all of them (the instruction, examples) belongs there. Contents are data: a special token that a document spells
out is the characters it is spelled with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moesaic.errors import UserError
from moesaic.know.answer.writer import Conversation, Form
from moesaic.model.directory import load
from moesaic.model.transformer import Model
from moesaic.model.untrusted_content import encode_untrusted
from moesaic.serve.chat_client import ChatClient, Refused, Reply
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Sampling

CHARS_PER_TOKEN = 3  # of a server that does not count: fewer than most texts have, so that what is counted fits
UNKNOWN_CONTEXT = 4096  # of a server that does not say
# How the templates of widespread models mark roles, turns and tool calls. A server reads them as tokens in any text.
MARKERS = re.compile(
    r"<(?=\|[^\s|<>]{1,40}\|>|/?s>|/?(?:start_of_turn|end_of_turn|bos|eos|pad|unk|tool_call|tool_response|think)>|<SYS>>|</SYS>>"
    r"|\uff5c[^\s\uff5c<>]{1,40}\uff5c>)|\[(?=/?INST\]|TOOL_CALLS\]|AVAILABLE_TOOLS\])",
    re.I,
)


class EngineWriter:
    """Keeps its engine: what was computed for a call is there for the next."""

    def __init__(self, model: Model | Engine) -> None:
        self.engine = model if isinstance(model, Engine) else Engine(model, seed=0)
        tokenizer = self.engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise UserError("model", "has no tokenizer with a chat template", "Use a model that was trained to chat.")
        self.tokenizer = tokenizer

    @classmethod
    def open(cls, directory: str | Path) -> EngineWriter:
        return cls(load(directory))

    @property
    def context(self) -> int:
        """Tokens of a conversation and its answer together."""
        return self.engine.max_length

    def count(self, conversation: Conversation) -> int:
        """Tokens of a conversation, opened for the answer."""
        return len(encode_untrusted(self.tokenizer, conversation))

    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed, grammar=grammar_of(form))
        prompts = [encode_untrusted(self.tokenizer, conversation) for conversation in conversations]
        for number, prompt in enumerate(prompts):
            if len(prompt) >= self.context:
                raise too_long(number, f"has {len(prompt)} tokens, and the model holds {self.context} with its answer")
        requests = [self.engine.request(prompt, sampling) for prompt in prompts]
        return [completion.text for completion in self.engine.complete(requests)]


class ServerWriter:
    """`model` is the server's first where none is named. A server that refuses grammars is asked without one from then
    on, and others pass over them, so whoever reads a form by grammar must take any text."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None, concurrency: int = 8) -> None:
        remedy = "Is the server there? Name its model with --name, its key with --api-key-env."
        self.client = ChatClient(url, model, key, concurrency, remedy=remedy)
        self.takes_grammars = True
        self._context: int | None = None
        self._counts = True

    @property
    def context(self) -> int:
        """As the server tells it (vLLM, SGLang and this one do)."""
        if self._context is None:
            cards = [card for card in self._get("models").get("data") or [] if isinstance(card, dict)]
            own = next((card for card in cards if card.get("id") == self.client.model_name()), {})
            said = own.get("max_model_len")
            self._context = said if isinstance(said, int) and said > 0 else UNKNOWN_CONTEXT
        return self._context

    def count(self, conversation: Conversation) -> int:
        """By the server where it can, else an estimate that is rather too high."""
        messages = [plain(message) for message in conversation]
        if self._counts:
            counted = self._get("../tokenize", {"model": self.client.model_name(), "messages": messages}).get("count")
            if isinstance(counted, int):
                return counted
            self._counts = False
        return sum(len(str(message.get("content"))) // CHARS_PER_TOKEN + 8 for message in messages)

    def write(
        self,
        conversations: Sequence[Conversation],
        *,
        max_tokens: int,
        form: Form | None = None,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> list[str]:
        replies: dict[int, str] = {}

        def keep(number: int, reply: Reply) -> None:
            if reply.too_long:
                raise too_long(number, "is longer than the context of the server's model")
            replies[number] = reply.text

        fields = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed} | self._form_fields(form)
        asked = [([plain(message) for message in conversation], fields) for conversation in conversations]
        try:
            self.client.ask_all(asked, keep)
        except Refused as error:
            without = form is not None and form.grammar is not None and self.takes_grammars
            if not without or error.status not in (400, 422, 501):
                raise
            self.takes_grammars = False
            return self.write(conversations, max_tokens=max_tokens, form=form, temperature=temperature, seed=seed)
        return [replies[number] for number in range(len(conversations))]

    def _form_fields(self, form: Form | None) -> dict[str, Any]:
        if form is not None and form.schema is not None:
            schema = {"name": "answer", "strict": True, "schema": dict(form.schema)}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
        if form is not None and form.grammar is not None and self.takes_grammars:
            return {"structured_outputs": {"grammar": form.grammar}}
        return {}

    def _get(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What a server may or may not offer; nothing where it does not."""
        import httpx  # takes a while to import

        address = f"{self.client.url}/{path}".replace("/v1/..", "")
        headers = {"authorization": f"Bearer {self.client.key}"} if self.client.key else {}
        try:
            with httpx.Client(headers=headers, timeout=30.0) as client:
                response = client.get(address) if body is None else client.post(address, json=dict(body))
                found = response.json() if response.is_success else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def grammar_of(form: Form | None) -> Grammar | None:
    if form is None:
        return None
    if form.schema is not None:
        return Grammar.json(dict(form.schema), "form", whitespace=" ?")  # small models fill whole answers with it
    return Grammar.written(form.grammar, "form") if form.grammar is not None else None


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in which no marker of a chat template can be read as one: a space follows its first character."""
    content = message.get("content")
    if not isinstance(content, str):
        return dict(message)
    return {**message, "content": MARKERS.sub(lambda found: f"{found[0]} ", content)}


def too_long(number: int, problem: str) -> UserError:
    return UserError(f"conversation {number}", problem, "Give it fewer or shorter passages.")
