"""POST /completion and /infill: a completion (`api/completions.py`) in llama.cpp's form."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, RootModel

from moesaic.errors import UserError
from moesaic.serve.api.completions import Completions
from moesaic.serve.api.errors import ApiError, llamacpp_form, translated
from moesaic.serve.api.fields import note_ignored
from moesaic.serve.api.infill import ExtraFile, infill_of
from moesaic.serve.api.llamacpp.generation_settings import generation_settings
from moesaic.serve.api.llamacpp.line_limits import LineLimits
from moesaic.serve.api.llamacpp.probabilities import as_logprobs, as_probs, recordable
from moesaic.serve.api.llamacpp.prompts import prompts_of, tokens_of
from moesaic.serve.api.llamacpp.schema import AppliedAdapter, CompletionRequest, InfillRequest, NativeRequest
from moesaic.serve.api.schema.completions import CompletionRequest as Plain
from moesaic.serve.api.schema.sampling import GenerationRequest
from moesaic.serve.api.service import CHARS_PER_TOKEN, Service
from moesaic.serve.api.stream import Generation, Outputs, event
from moesaic.serve.api.timings import timings
from moesaic.serve.core.request import Output, Request, TokenLogprob

NO_SLOT = -1  # requests are not bound to slots here
RESERVED = 256  # tokens for what is filled in, where a request does not say how many
LEAST_PROMPT = 16
LEAST_TOP_P = 1e-6  # keeps the likeliest token, as 0 does there


def as_completion(service: Service, body: NativeRequest, prompts: Sequence[Sequence[int]]) -> Plain:
    """The same request for a completion of tokens."""
    fields: dict[str, Any] = {
        name: value for name in GenerationRequest.model_fields if (value := getattr(body, name, None)) is not None
    }
    asked = body.n_predict if body.n_predict is not None else -1
    fields |= {"prompt": [list(tokens) for tokens in prompts], "max_tokens": None if asked < 0 else asked}
    if asked == 0:
        fields["echo"] = True  # the prompt is computed, and nothing follows
    if body.n_probs:
        fields["logprobs"] = body.n_probs
    if body.temperature is not None:
        fields["temperature"] = max(0.0, body.temperature)
    if body.top_p is not None:
        fields["top_p"] = max(LEAST_TOP_P, body.top_p)
    if body.seed is not None and (body.seed < 0 or body.seed == 2**32 - 1):
        del fields["seed"]  # a random one
    if isinstance(body.samplers, list) and "infill" in body.samplers:
        fields["samplers"] = [name for name in body.samplers if name != "infill"]
        note_ignored("samplers.infill")  # joining tokens that begin alike is not done here
    if not fields.get("grammar"):
        fields.pop("grammar", None)
    elif "json_schema" in fields:
        del fields["json_schema"]  # as llama.cpp has it, the grammar counts
    if body.lora is not None and (name := adapter_name(service, body.lora)) is not None:
        fields["model"] = name
    return translated(Plain, fields)


def adapter_name(service: Service, applied: Sequence[AppliedAdapter]) -> str | None:
    """The one adapter a request applies; here an adapter is applied as it is, alone."""
    names = list(service.engine.adapters)
    chosen = [one for one in applied if one.scale]
    if len(chosen) > 1 or any(one.scale != 1.0 for one in chosen):
        raise UserError("lora", "one adapter is applied at a time, with a scale of 1", "Choose one.")
    if chosen and not 0 <= chosen[0].id < len(names):
        raise UserError("lora", f"there is no adapter {chosen[0].id}", "GET /lora-adapters lists them.")
    return names[chosen[0].id] if chosen else None


@dataclass
class Result:
    """One completion as it is generated."""

    index: int
    request: Request
    content: str = ""
    ended: bool = False
    cut: bool = False  # by the limits of its lines
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class NativeCompletion(Generation):
    id_prefix = Completions.id_prefix
    ending = ""  # the last event says stop: true

    def __init__(self, service: Service, body: NativeRequest, completions: Completions) -> None:
        super().__init__(service, body, completions.requests)
        self.discarded_tokens = completions.discarded_tokens
        self.results = {one.number: Result(index, one) for index, one in enumerate(self.requests)}
        self.limits = LineLimits(body.n_indent or 0, body.t_max_predict_ms or 0)

    @classmethod
    def prepare(cls, service: Service, body: CompletionRequest, salt: str) -> NativeCompletion:
        given = prompts_of(body.prompt)
        names = ["prompt"] if len(given) == 1 else [f"prompt.{number}" for number in range(len(given))]
        prompts = [tokens_of(service, one, name) for one, name in zip(given, names, strict=True)]
        return cls.of(service, body, prompts, salt)

    @classmethod
    def of(
        cls,
        service: Service,
        body: NativeRequest,
        prompts: list[list[int]],
        salt: str,
        ends: frozenset[int] = frozenset(),
    ) -> NativeCompletion:
        if not all(prompts):
            raise UserError("prompt", "is empty")
        plain = as_completion(service, body, prompts)
        own_pages = f"{salt}/{uuid.uuid4().hex}" if body.cache_prompt is False else salt
        made = Completions.prepare(service, plain, own_pages)
        for request in made.requests:
            more: dict[str, Any] = recordable(request.sampling) if body.post_sampling_probs else {}
            request.sampling = replace(request.sampling, stop_tokens=request.sampling.stop_tokens | ends, **more)
        return cls(service, body, made)

    @staticmethod
    def field_name(place: str) -> str:
        names = {"max_tokens": "n_predict", "logprobs": "n_probs", "record_draws": "post_sampling_probs"}
        return names.get(place, place)

    def failed(self, error: ApiError) -> str:
        return event(llamacpp_form(error.status, error.body.error))

    def push(self, output: Output) -> list[dict[str, Any]]:
        result = self.results[output.request.number]
        if result.ended:
            return []
        if self.discarded_tokens:
            tokens, text, logprobs = [], "", []
        else:
            tokens, text, logprobs = list(output.tokens), output.text, list(output.logprobs)
        before, result.content = len(result.content), result.content + text
        result.tokens += tokens
        result.logprobs += logprobs
        result.ended = output.finish_reason is not None
        if self.limits and (kept := self.limits.kept(result.content, output.request)) is not None:
            result.content, result.ended, result.cut = result.content[:kept], True, True
        chunks: list[dict[str, Any]] = []
        if tokens or text:
            chunks.append(self._partial(result, tokens, result.content[before:], logprobs))
        if result.ended:
            chunks.append(self._whole(result, "", [], []))
        return chunks

    @property
    def ended(self) -> bool:
        """Whether nothing more is wanted, though the engine may go on until it hears of it."""
        return all(result.ended for result in self.results.values())

    async def collect(self, outputs: Outputs) -> BaseModel | bytes:
        if not self.limits:
            return await super().collect(outputs)
        async for batch in outputs.batches():
            for output in batch:
                self.take(output)
            if self.ended:
                break
        return self.response()

    async def events(self, outputs: Outputs) -> AsyncIterator[str]:
        async for batch in outputs.batches():
            if chunks := [event(chunk) for output in batch for chunk in self.take(output)]:
                yield "".join(chunks)
            if self.ended:
                return

    def response(self) -> BaseModel:
        found = [self._whole(one, one.content, one.tokens, one.logprobs) for one in self.results.values()]
        return RootModel[Any](found[0] if len(found) == 1 else found)

    def _partial(self, result: Result, tokens: list[int], text: str, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": result.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": len(result.request.prompt),
        }
        if self.body.timings_per_token:
            found["timings"] = timings([result.request]).model_dump()
        return found | self._probabilities(logprobs, result.request)

    def _whole(self, result: Result, text: str, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, Any]:
        body, request = self.body, result.request
        stop_type, word = ("limit", "") if result.cut else stopped_by(request)
        found = {
            "index": result.index,
            "content": text,
            "tokens": tokens if body.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "model": self.model,
            "tokens_predicted": len(result.tokens),
            "tokens_evaluated": len(request.prompt),
            "generation_settings": self._settings(request),
            "prompt": self.service.tokenizer.decode(request.prompt, special=True),
            "has_new_line": "\n" in result.content,
            "truncated": stop_type == "limit" and len(request.tokens) >= self.service.engine.max_length,
            "stop_type": stop_type,
            "stopping_word": word,
            "tokens_cached": request.cached,
            "timings": timings([request], discarded=self.discarded_tokens).model_dump(),
        }
        found |= self._probabilities(logprobs, request)
        return selected(found, body.response_fields) if body.response_fields else found

    def _settings(self, request: Request) -> dict[str, Any]:
        body = self.body
        return generation_settings(
            request.sampling,
            request.seed,
            n_predict=body.n_predict if body.n_predict is not None else -1,
            stream=bool(body.stream),
            n_probs=body.n_probs or 0,
            post_sampling_probs=bool(body.post_sampling_probs),
            timings_per_token=bool(body.timings_per_token),
        )

    def _probabilities(self, logprobs: list[TokenLogprob], request: Request) -> dict[str, Any]:
        count, decoder = self.body.n_probs, self.service.token_decoder
        if not count or not logprobs:
            return {}
        if self.body.post_sampling_probs:
            return {"completion_probabilities": [as_probs(decoder, one, count, request.sampling) for one in logprobs]}
        return {"completion_probabilities": [as_logprobs(decoder, one, count) for one in logprobs]}


class Infilling(NativeCompletion):
    @classmethod
    def prepare(cls, service: Service, body: InfillRequest, salt: str) -> NativeCompletion:  # type: ignore[override]
        infill = infill_of(service.tokenizer)
        if infill is None:
            message = "this model has no special tokens to fill in the middle with"
            raise ApiError(501, message, code="not_supported")
        # Editors send more than fits, and rely on what is next to the gap being kept.
        most = service.engine.max_length - max(1, body.n_predict or RESERVED)
        far = CHARS_PER_TOKEN * most
        prefix = tokens_of(service, _end(body.input_prefix, far), "input_prefix", special=False)
        suffix = tokens_of(service, body.input_suffix[:far], "input_suffix", special=False)
        middle = tokens_of(service, (body.prompt or "")[:far], "prompt", special=False)
        extra = [ExtraFile(_end(one.text, far), one.filename[:far]) for one in body.input_extra or ()]
        if most < LEAST_PROMPT:
            raise UserError("n_predict", f"leaves no room for a prompt: the context holds {most} tokens more")
        prompt = infill.prompt([*prefix, *middle], suffix, extra=extra, most=most)
        return cls.of(service, body, [prompt], salt, infill.ends)


def _end(text: Any, length: int) -> Any:
    return text[-length:]


def stopped_by(request: Request) -> tuple[str, str]:
    """llama.cpp's `stop_type` and the stop string."""
    if request.finish_reason == "length":
        return "limit", ""
    if isinstance(request.stop_reason, str):
        return "word", request.stop_reason
    return ("eos" if request.finish_reason == "stop" else "none"), ""


def selected(found: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Some fields of a response, nested ones by their path; those that are not there are left out."""
    chosen: dict[str, Any] = {}
    for path in fields:
        at: Any = found
        for part in path.split("/"):
            at = at.get(part, found) if isinstance(at, dict) else found
        if at is not found:
            chosen[path] = at
    return chosen
