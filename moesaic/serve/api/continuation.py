"""One answer of /v1/completions, as it comes, with the prompt before it if that is to be echoed."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from moesaic.serve.api.counting import prompt_logprobs
from moesaic.serve.api.schema.completions import CompletionChoice, CompletionLogprobs, CompletionRequest
from moesaic.serve.api.tokens_as_text import TokenTexts, finite
from moesaic.serve.core.request import Output, Request, TokenLogprob


class Continuation:
    def __init__(self, request: Request, texts: TokenTexts, echo: str, form: CompletionRequest) -> None:
        self.request = request
        self.texts = texts
        self.echo = echo if form.echo else ""
        self.form = form
        self.parts: list[CompletionChoice] = []
        self.offset = 0  # characters of the text so far, as its tokens spell it
        self.spelled = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens."""
        answer = self.request.answer
        return sum(one.logprob for one in answer) / max(1, len(answer))

    def push(self, output: Output) -> CompletionChoice:
        """What an output adds; the first also brings the prompt."""
        text, tokens = (output.text, output.logprobs) if self.form.max_tokens != 0 else ("", [])
        before: list[tuple[int, TokenLogprob | None]] = []
        if not self.parts and self.form.echo:
            text = self.echo + text
            if self.form.logprobs is not None:
                before = list(zip(self.request.prompt, self.request.prompt_logprobs, strict=True))
        logprobs = None
        if self.form.logprobs is not None:
            logprobs = self._logprobs([*before, *((one.token, one) for one in tokens)], len(before))
        part = CompletionChoice(index=0, text=text, logprobs=logprobs, finish_reason=self._reason(output))
        self.parts.append(part)
        return part

    def choice(self, index: int) -> CompletionChoice:
        """The whole of it."""
        return CompletionChoice(
            index=index,
            text="".join(part.text for part in self.parts),
            logprobs=_joined(part.logprobs for part in self.parts) if self.form.logprobs is not None else None,
            finish_reason=self.parts[-1].finish_reason,
            prompt_logprobs=prompt_logprobs(self.request, self.texts)
            if self.form.prompt_logprobs is not None
            else None,
        )

    def _reason(self, output: Output) -> str | None:
        return "length" if self.form.max_tokens == 0 else output.finish_reason

    def _logprobs(self, tokens: list[tuple[int, TokenLogprob | None]], echoed: int) -> CompletionLogprobs:
        """The first `echoed` tokens are those of the prompt."""
        found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        assert found.top_logprobs is not None
        for place, (token, info) in enumerate(tokens):
            found.tokens.append(self.texts.text(token))
            told = self._in_text(token, place < echoed)
            found.text_offset.append(self._spell(self.texts.raw(token)) if told else self.offset)
            found.token_logprobs.append(None if info is None else finite(info.logprob))
            found.top_logprobs.append(None if info is None else self._top(info))
        return found

    def _spell(self, raw: bytes) -> int:
        """Count a token's characters; where they begin. Half a character is none until its other half has come, and
        a sign in place of it, before the token that came instead, if that does not."""
        half = self._half
        head = self.spelled.decode(raw[:1])
        broken = half and len(head) + self._half > 1  # one more than the character that was to be ended
        begins = self.offset + broken
        self.offset += len(head) + len(self.spelled.decode(raw[1:]))
        return begins

    @property
    def _half(self) -> bool:
        """Whether a character has begun and not ended."""
        return bool(self.spelled.getstate()[0])

    def _in_text(self, token: int, echoed: bool) -> bool:
        """Marks that begin or end a text are not part of it, unless the prompt was sent with them."""
        if not self.texts.is_mark(token):
            return True
        return echoed and self.echo.startswith(self.texts.text(token), self.offset + self._half)

    def _top(self, info: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens, and the one that was chosen."""
        wanted = [*info.top[: self.form.logprobs or 0], (info.token, info.logprob)]
        return {self.texts.text(token): finite(logprob) for token, logprob in wanted}


def _joined(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs:
    whole = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    assert whole.top_logprobs is not None
    for part in parts:
        if part is not None:
            whole.tokens += part.tokens
            whole.token_logprobs += part.token_logprobs
            whole.top_logprobs += part.top_logprobs or []
            whole.text_offset += part.text_offset
    return whole
