"""POST /v1/completions: text that continues a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from moesaic.errors import UserError
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.infill import need_infill
from moesaic.serve.api.logprobs import (
    Shown,
    TokenDecoder,
    check_entries,
    check_given,
    finite,
    prompt_logprobs,
)
from moesaic.serve.api.prompts import prompt_place, prompt_texts, prompt_tokens
from moesaic.serve.api.sampling_params import engine_requests, sampling_params
from moesaic.serve.api.schema.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import STREAMS, Generation, generate
from moesaic.serve.api.structured import output_grammar
from moesaic.serve.api.token_ids import TokenIds
from moesaic.serve.core.request import Output, Request, TokenLogprob


class Completions(Generation):
    """`best_of` completions of each prompt are generated, of which the likeliest `n` are sent."""

    id_prefix = "cmpl-"
    chunk_object = "text_completion"

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        choices: Sequence[ChoiceBuilder],
        prompts: int,
        best_of: int,
        n: int,
    ) -> None:
        super().__init__(service, body, [choice.request for choice in choices])
        self.choices = {choice.request.number: choice for choice in choices}
        self.prompts = prompts
        self.best_of = best_of
        self.n = n
        self.discarded_tokens = int(body.max_tokens == 0)

    @classmethod
    def prepare(cls, service: Service, body: CompletionRequest, salt: str) -> Completions:
        n = body.n or 1
        best_of = body.best_of or n
        if best_of < n:
            raise UserError("best_of", f"must be at least n, which is {n}")
        if best_of > n and body.stream:
            raise UserError("best_of", "cannot be streamed: the best are known when all are complete")
        if body.max_tokens == 0 and not body.echo:
            raise UserError("max_tokens", "must be at least 1, unless the prompt is to be echoed")
        sampling = sampling_params(
            service,
            body,
            # Prefill gives the prompt's log-probabilities, and one token too many, which is discarded.
            max_tokens=1 if body.max_tokens == 0 else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
            logprob_tokens=check_given(body, body.logprobs, body.max_tokens),
            grammar=output_grammar(body, service.special_tokens),
        )
        special = not body.suffix and body.add_special_tokens is not False
        prompts = prompt_tokens(service, body.prompt, body, body.max_tokens, special=special)
        if body.suffix:
            infill = need_infill(service.tokenizer, "suffix")
            after = service.tokenize(body.suffix, special=False)
            prompts = [infill.prompt(before, after) for before in prompts]
            sampling = replace(sampling, stop_tokens=sampling.stop_tokens | infill.ends)
        service.check_count(len(prompts) * best_of)
        truncated = body.truncate_prompt_tokens is not None
        texts = prompt_texts(service, body.prompt, prompts, truncated) if body.echo else [""] * len(prompts)
        choices: list[ChoiceBuilder] = []
        for number, (tokens, text) in enumerate(zip(prompts, texts, strict=True)):
            with prompt_place("prompt", body.prompt, number):
                check_entries(body, sampling, len(tokens), service.engine.model.config.vocab)
                requests = engine_requests(service, body, tokens, sampling, salt=salt, count=best_of)
            for request in requests:
                choices.append(ChoiceBuilder(len(choices), request, service.token_decoder, text, body))
        return cls(service, body, choices, len(prompts), best_of, n)

    @staticmethod
    def field_name(place: str) -> str:
        return "stop_token_ids" if place == "stop_tokens" else place

    def heavy(self, output: Output) -> bool:
        first = not self.choices[output.request.number].parts
        return super().heavy(output) or bool(first and self.body.echo and output.request.prompt_logprobs)

    def push(self, output: Output) -> list[dict[str, Any]]:
        choice = self.choices[output.request.number]
        part = choice.push(output)
        if part.text or part.logprobs is not None or part.finish_reason is not None:
            logprobs = part.logprobs.model_dump() if part.logprobs is not None else None
            return [{"index": choice.index, **part._asdict(), "logprobs": logprobs} | choice.ids.chunk()]
        return []

    def response(self) -> CompletionResponse:
        return CompletionResponse(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[choice.whole(index) for index, choice in enumerate(self.best())],
            usage=self.usage(),
            timings=self.timings(),
        )

    def best(self) -> list[ChoiceBuilder]:
        choices = list(self.choices.values())
        best = []
        for start in range(0, len(choices), self.best_of):
            group = choices[start : start + self.best_of]
            if self.body.use_beam_search:
                group = group[: self.n]
            elif self.best_of > self.n:
                group = sorted(group, key=lambda choice: -choice.mean_logprob)[: self.n]
            best += group
        return best


class Part(NamedTuple):
    """What one output adds to a choice."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class ChoiceBuilder:
    """One choice as it is generated, with the prompt before it if that is to be echoed."""

    def __init__(self, index: int, request: Request, decoder: TokenDecoder, echo: str, body: CompletionRequest) -> None:
        self.index = index
        self.request = request
        self.decoder = decoder
        self.ids = TokenIds(request, body, prompt_in_choice=True)
        self.shown = Shown.of(body, body.logprobs or 0)
        self.echo = echo if body.echo else ""
        self.body = body
        self.parts: list[Part] = []
        self.offset = 0  # characters of the text so far, as its tokens spell it
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def mean_logprob(self) -> float:
        answer = self.request.logprobs
        return sum(one.logprob for one in answer) / max(1, len(answer))

    def push(self, output: Output) -> Part:
        """What an output adds; the first also brings the prompt."""
        text, tokens = (output.text, output.logprobs) if self.body.max_tokens != 0 else ("", [])
        prompt: list[tuple[int, TokenLogprob | None]] = []
        if not self.parts and self.body.echo:
            text = self.echo + text
            if self.body.logprobs is not None:
                prompt = list(zip(self.request.prompt, self.request.prompt_logprobs, strict=True))
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = self._logprobs([*prompt, *((one.token, one) for one in tokens)], len(prompt))
        finish_reason = "length" if self.body.max_tokens == 0 else output.finish_reason
        self.ids.add(output.tokens if self.body.max_tokens != 0 else [])
        part = Part(text, logprobs, finish_reason)
        self.parts.append(part)
        return part

    def whole(self, index: int) -> CompletionChoice:
        body = self.body
        choice = CompletionChoice(
            index=index,
            text="".join(part.text for part in self.parts),
            logprobs=_joined(part.logprobs for part in self.parts) if body.logprobs is not None else None,
            finish_reason=self.parts[-1].finish_reason,
            **self.ids.whole(),
        )
        if body.prompt_logprobs is not None:  # set later: checking a hundred thousand would hold up all threads
            choice.prompt_logprobs = prompt_logprobs(self.request, self.decoder)
        return choice

    def _logprobs(self, tokens: list[tuple[int, TokenLogprob | None]], echoed: int) -> CompletionLogprobs:
        """The first `echoed` tokens are those of the prompt."""
        found = _no_logprobs()
        assert found.top_logprobs is not None
        for place, (token, chosen) in enumerate(tokens):
            found.tokens.append(self.decoder.name(token, self.shown.as_ids))
            shown = self._in_text(token, place < echoed)
            found.text_offset.append(self._advance(self.decoder.bytes_of(token)) if shown else self.offset)
            found.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
            found.top_logprobs.append(None if chosen is None else self._top(chosen))
        return found

    def _advance(self, raw: bytes) -> int:
        """Count a token's characters; where they begin. Half a character is none until its other half has come, and
        a replacement character, before the token that came instead, if that does not."""
        half = self._half
        head = self.utf8.decode(raw[:1])
        broken = half and len(head) + self._half > 1  # one more than the character that was to be ended
        begins = self.offset + broken
        self.offset += len(head) + len(self.utf8.decode(raw[1:]))
        return begins

    @property
    def _half(self) -> bool:
        """Whether a character has begun and not ended."""
        return bool(self.utf8.getstate()[0])

    def _in_text(self, token: int, echoed: bool) -> bool:
        """Special tokens that start or end a text are not part of it, unless the prompt was sent with them."""
        if not self.decoder.is_skipped(token):
            return True
        return echoed and self.echo.startswith(self.decoder.text(token), self.offset + self._half)

    def _top(self, chosen: TokenLogprob) -> dict[str, float]:
        """The one that was chosen, and the likeliest tokens, or those that were given."""
        top = [(chosen.token, chosen.logprob), *self.shown.others(chosen)]
        return {self.decoder.name(token, self.shown.as_ids): finite(logprob) for token, logprob in top}


def _no_logprobs() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def _joined(parts: Iterable[CompletionLogprobs | None]) -> CompletionLogprobs:
    whole = _no_logprobs()
    assert whole.top_logprobs is not None
    for part in parts:
        if part is not None:
            whole.tokens += part.tokens
            whole.token_logprobs += part.token_logprobs
            whole.top_logprobs += part.top_logprobs or []
            whole.text_offset += part.text_offset
    return whole


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=ERRORS | STREAMS, tags=["text"])
    async def completions(body: CompletionRequest, request: HttpRequest) -> Response:
        """Text that continues a prompt."""
        return await generate(Completions, service, body, request)

    return routes
