"""POST /generate: SGLang's own route, which RL frameworks ask for `input_ids` in and `output_ids` out.

A translation: the body becomes a completion, and its outputs are written in SGLang's form. In a stream every event has
all text and tokens so far, as SGLang's have by default, and the last the log-probabilities: all of them in every one
would be the square of a long text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import BaseModel, RootModel

from moesaic.errors import UserError
from moesaic.serve.api.completions import Completions
from moesaic.serve.api.errors import ERRORS
from moesaic.serve.api.logprobs import finite
from moesaic.serve.api.prompts import single
from moesaic.serve.api.schema.completions import CompletionRequest
from moesaic.serve.api.schema.sglang import GenerateRequest, SglangSampling
from moesaic.serve.api.service import Service
from moesaic.serve.api.stream import HEAVY, STREAMS, Generation, Outputs, event, generate
from moesaic.serve.core.request import Output, Request, TokenLogprob

# What a completion calls a field of the body, or of its sampling_params.
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
PLACES = {
    **{name: f"sampling_params.{name}" for name in SglangSampling.model_fields},
    **{name: f"sampling_params.{theirs}" for name, theirs in NAMES.items()},
    "logprobs": "top_logprobs_num",
    "logprob_token_ids": "token_ids_logprob",
    "stop_tokens": "sampling_params.stop_token_ids",
}


def as_completion(body: GenerateRequest) -> CompletionRequest:
    if (body.text is None) == (body.input_ids is None):
        raise UserError("text", "give either text or input_ids")
    if body.token_ids_logprob and body.top_logprobs_num:
        raise UserError("token_ids_logprob", "cannot be reported together with top_logprobs_num", "Give one.")
    sampling = body.sampling_params
    fields = sampling.model_dump(by_alias=True, exclude_unset=True, exclude=set(NAMES.values()))
    fields |= {ours: value for ours, theirs in NAMES.items() if (value := getattr(sampling, theirs)) is not None}
    top = (body.top_logprobs_num or 0) if body.return_logprob else None
    whole = body.return_logprob and (body.logprob_start_len if body.logprob_start_len is not None else -1) >= 0
    return CompletionRequest.model_validate(
        fields
        | {
            "prompt": body.text if body.text is not None else body.input_ids,
            "model": body.lora_path or body.model,
            "priority": body.priority,
            "echo": fields.get("max_tokens") == 0,  # which asks for the prompt alone
            "logprobs": top,
            "prompt_logprobs": top if whole else None,
            "logprob_token_ids": body.token_ids_logprob if body.return_logprob else None,
        }
    )


class Generated(Generation):
    id_prefix = ""
    chunk_object = ""

    def __init__(self, service: Service, body: GenerateRequest, made: Completions) -> None:
        super().__init__(service, body, made.requests)
        self.prompts, self.discarded_tokens = made.prompts, made.discarded_tokens
        self.texts = {request.number: "" for request in made.requests}
        self.tokens: dict[int, list[int]] = {request.number: [] for request in made.requests}
        self.several = made.prompts > 1 or not single(made.body.prompt) or made.n > 1
        self.began = time.monotonic()

    @classmethod
    def prepare(cls, service: Service, body: GenerateRequest, salt: str) -> Generated:
        return cls(service, body, Completions.prepare(service, as_completion(body), salt))

    @staticmethod
    def field_name(place: str) -> str:
        return PLACES.get(place, place)

    def heavy(self, output: Output) -> bool:
        return output.finish_reason is not None and self.logprob_count(output.request) > HEAVY

    def push(self, output: Output) -> list[dict[str, Any]]:
        if not self.discarded_tokens:
            self.texts[output.request.number] += output.text
            self.tokens[output.request.number] += output.tokens
        return [self._written(output.request, output.finish_reason)] if self.body.stream else []

    async def events(self, outputs: Outputs) -> AsyncIterator[str]:
        async for batch in outputs.batches():
            yield "".join([event(chunk) for output in batch for chunk in await self.beside(self.take, output)])

    def response(self) -> BaseModel:
        found = [self._written(request, request.finish_reason) for request in self.requests]
        return RootModel[Any](found if self.several else found[0])

    def _written(self, request: Request, finish_reason: str | None) -> dict[str, Any]:
        index = self.requests.index(request)
        tokens = list(self.tokens[request.number])
        ended: dict[str, Any] | None = None
        if finish_reason == "stop" and tokens:
            ended = {"type": "stop", "matched": tokens[-1] if request.stop_reason is None else request.stop_reason}
        elif finish_reason is not None:
            ended = {"type": finish_reason if tokens else "length", "length": len(tokens)}
        name = self.body.rid or self.id
        meta: dict[str, Any] = {
            "id": f"{name}_{index}" if self.several else name,
            "finish_reason": ended,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": request.cached,
            "weight_version": str(request.versions[-1] if request.versions else self.service.engine.version),
            "e2e_latency": time.monotonic() - self.began,
        }
        if finish_reason is not None:
            meta |= self._logprobs(request, len(tokens))
        found = {"text": self.texts[request.number], "output_ids": tokens, "meta_info": meta}
        return found | ({"index": index} if self.several else {})

    def _logprobs(self, request: Request, made: int) -> dict[str, Any]:
        if not self.body.return_logprob:
            return {}
        written = request.logprobs[:made]
        found: dict[str, Any] = {"output_token_logprobs": [self._entry(one.token, one.logprob) for one in written]}
        kind = "token_ids_logprobs" if self.body.token_ids_logprob else "top_logprobs"
        if self.body.token_ids_logprob or self.body.top_logprobs_num:
            found[f"output_{kind}"] = [self._others(one) for one in written]
        if request.sampling.prompt_logprobs is not None:
            start = self.body.logprob_start_len or 0
            pairs = list(zip(request.prompt, request.prompt_logprobs))[start:]
            found["input_token_logprobs"] = [self._entry(token, one and one.logprob) for token, one in pairs]
            if self.body.top_logprobs_num:
                found["input_top_logprobs"] = [one and self._others(one) for _, one in pairs]
        return found

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        text = self.service.token_decoder.text(token) if self.body.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token, text]

    def _others(self, chosen: TokenLogprob) -> list[list[Any]]:
        return [self._entry(token, logprob) for token, logprob in chosen.top]


def router(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/generate", responses=ERRORS | STREAMS, tags=["text"])
    async def generate_route(body: GenerateRequest, request: HttpRequest) -> Response:
        """Text or tokens that continue a prompt, in SGLang's form."""
        return await generate(Generated, service, body, request)

    return routes
