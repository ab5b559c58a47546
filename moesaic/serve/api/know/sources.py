"""What a request is answered from: passages that the server finds for it, put before the model as data, and cited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.know import citing
from moesaic.serve.api.know.passages_prompt import INSTRUCTIONS, block, entry, with_passages
from moesaic.serve.api.knowledge import MAX_TEXT, Bases, Citation, Found, Passage
from moesaic.serve.api.schema.chat import ChatCompletionRequest, Message
from moesaic.serve.api.schema.know import attributes
from moesaic.serve.api.service import Service, new_id
from moesaic.serve.core.request import TooLong

SYSTEM = ("system", "developer")
ANSWER_TOKENS = 512  # kept free for an answer whose length nobody limited
SIGNS = frozenset("<>[]{}|\uff5c")  # of which a control token has one; runs of spaces and plain words have none
TURN_TOKENS = 8  # that a chat template puts around a message


@dataclass
class Sources:
    """`found` is what the search gave; `shown` is what of it fits into the prompt, the best first, and is cited."""

    bases: Bases
    queries: list[str]
    found: list[Found]
    question: str
    shown: list[Found] = field(default_factory=list)
    id: str = field(default_factory=lambda: new_id("fs_"))

    @property
    def passages(self) -> list[Passage]:
        return [one.passage for one in self.shown]

    def in_prompt(self, service: Service, body: ChatCompletionRequest, max_tokens: int | None) -> ChatCompletionRequest:
        """The request, with the passages before what the user said last. It may be asked for again, of a conversation
        from which something was left out."""
        place = last_of_user(body.messages)
        tokenizer = service.tokenizer
        control = control_tokens(tokenizer)
        said = "\n".join([*(text_of(message) for message in body.messages), with_passages("", block([]), INSTRUCTIONS)])
        service.check_size(len(said), "characters", "messages")
        used = len(tokenizer.encode(said, special=False)) + TURN_TOKENS * (2 + len(body.messages))
        room = service.max_prompt - used - min(max_tokens or ANSWER_TOKENS, service.max_prompt // 2)
        self.shown = []
        for number, one in enumerate(self.found, 1):
            text = one.passage.text
            while text and self._tokens(service, number, replace(one.passage, text=text), control) > room:
                # The best one is cut where it does not fit; of the others there are enough.
                text = text[: len(text) // 2] if number == 1 and len(text) > 80 else ""
            if not text:
                break
            shown = replace(one.passage, text=text, end=one.passage.start + len(text))
            room -= self._tokens(service, number, shown, control)
            self.shown.append(Found(one.base, shown))
        if self.found and not self.shown:
            raise TooLong("messages", "leave no room for a passage of the texts", "Shorten them, or ask without.")
        messages = list(body.messages)
        instructed = instruct(messages[0].role in SYSTEM, tokenizer)
        said = with_passages(
            text_of(messages[place]), block(self.passages, control), "" if instructed else INSTRUCTIONS
        )
        messages[place] = messages[place].model_copy(update={"content": said})
        if instructed and messages[0].role in SYSTEM:
            both = f"{text_of(messages[0])}\n\n{INSTRUCTIONS}"
            messages[0] = messages[0].model_copy(update={"content": both})
        elif instructed:
            messages.insert(0, Message(role="system", content=INSTRUCTIONS))
        return body.model_copy(update={"messages": messages})

    def _tokens(self, service: Service, number: int, passage: Passage, control: Sequence[str]) -> int:
        return len(service.tokenizer.encode(entry(number, passage, control), special=False)) + 1

    def citations(self, answer: str) -> list[Citation]:
        """Those of an answer, as its base checks them."""
        if not self.shown:
            return []
        base = self.bases.bases[self.shown[0].base]
        return list(base.cite(self.question, answer, self.passages))[: citing.MOST]


def instruct(has_system: bool, tokenizer: Tokenizer) -> bool:
    """Whether the instructions go into the system prompt, where a small model follows them better: unless the chat
    template has no place for one."""
    if has_system:
        return True
    turns = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "?"}]
    try:
        return INSTRUCTIONS in tokenizer.chat(turns)
    except UserError:
        return False


def control_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Words that the tokenizer reads as one token wherever they stand: special ones, and those of thoughts and calls.
    Longer ones first: one may begin with another."""
    words = {token.content for token in tokenizer.fast.get_added_tokens_decoder().values()}
    return tuple(sorted((word for word in words if SIGNS & set(word)), key=lambda word: (-len(word), word)))


def bounded(passage: Passage) -> Passage:
    if len(passage.text) <= MAX_TEXT:
        return passage
    return replace(passage, text=passage.text[:MAX_TEXT], end=passage.start + MAX_TEXT)


def last_of_user(messages: Sequence[Message]) -> int:
    for place in range(len(messages) - 1, -1, -1):
        if messages[place].role == "user":
            return place
    raise UserError("messages", "holds no message of the user to search for")


def text_of(message: Message) -> str:
    content = message.content or ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def annotation(citation: Citation, passage: Passage) -> dict[str, Any]:
    """As chat completions have them."""
    place = {"start_index": citation.start, "end_index": citation.end, "title": passage.title, "url": passage.source}
    quoted = {name: getattr(citation, name) for name in ("number", "quote", "quote_start", "quote_end", "supported")}
    return {"type": "url_citation", "url_citation": place | quoted}


def search_results(sources: Sources) -> list[dict[str, Any]]:
    """What the model was shown, by the numbers it cites."""
    own = ("id", "start", "end", "page", "score")
    return [
        {"number": number, "title": one.passage.title, "url": one.passage.source, "snippet": one.passage.text}
        | {"base": one.base}
        | {name: getattr(one.passage, name) for name in own}
        for number, one in enumerate(sources.shown, 1)
    ]


def file_citation(citation: Citation, passage: Passage) -> dict[str, Any]:
    """As Responses have them: `index` is where in the text it belongs."""
    named = {"type": "file_citation", "index": citation.end, "file_id": passage.id, "filename": passage.source}
    quoted = {name: getattr(citation, name) for name in ("number", "quote", "quote_start", "quote_end", "supported")}
    return named | {"title": passage.title} | quoted


def file_results(sources: Sources) -> list[dict[str, Any]]:
    return [
        {"file_id": one.id, "filename": one.source, "score": one.score, "text": one.text, "attributes": attributes(one)}
        for one in sources.passages
    ]


def search_blocks(sources: Sources) -> list[dict[str, Any]]:
    """As Messages show a tool that the server runs, and what it gave."""
    name = sources.id.replace("fs_", "srvtoolu_")
    results = [
        {"type": "search_result", "source": one.source, "title": one.title}
        | {"content": [{"type": "text", "text": one.text}], "citations": {"enabled": True}}
        for one in sources.passages
    ]
    return [
        {"type": "server_tool_use", "id": name, "name": "file_search", "input": {"query": sources.queries[0]}},
        {"type": "file_search_tool_result", "tool_use_id": name, "content": results},
    ]


def result_location(citation: Citation, passage: Passage) -> dict[str, Any]:
    """As Messages cite a search result; `start_index` and `end_index` are of what names it in the text."""
    return {
        "type": "search_result_location",
        "source": passage.source,
        "title": passage.title,
        "cited_text": citation.quote,
        "search_result_index": citation.number - 1,
        "start_block_index": 0,
        "end_block_index": 1,
        "start_char_index": citation.quote_start,
        "end_char_index": citation.quote_end,
        "start_index": citation.start,
        "end_index": citation.end,
        "supported": citation.supported,
    }
