"""The sampling parameters of a request, as the engine takes them: OpenAI's fields, and the model's own defaults."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import UserError
from moesaic.serve.api.sampler_params import logit_bias, sampler_params
from moesaic.serve.api.schema.sampling import GenerationRequest
from moesaic.serve.api.service import Service
from moesaic.serve.core.context_windows import joined
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling

TUNED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")


def sampling_params(
    service: Service,
    body: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    logprob_tokens: tuple[int, ...] = (),
    grammar: Grammar | None = None,
) -> Sampling:
    values = dict(service.sampling_defaults)
    for name in (*TUNED, "seed", "ignore_eos", "min_tokens"):
        if (given := getattr(body, name)) is not None:
            values[name] = given
    values |= sampler_params(body)
    values["top_k"] = max(0, values.get("top_k", 0))
    if body.stream and body.prompt_logprobs is not None:
        raise UserError("prompt_logprobs", "cannot be streamed", "Leave out stream.")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise UserError("min_tokens", f"is {body.min_tokens}, which is more than the maximum of {max_tokens}")
    return Sampling(
        max_tokens=max_tokens,
        logit_bias=logit_bias(body.logit_bias or {}, service.engine.tokenizer),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_tokens=frozenset(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_tokens=logprob_tokens,
        grammar=grammar,
        **values,
    )


def engine_requests(
    service: Service, body: GenerationRequest, prompt: Sequence[int], sampling: Sampling, *, salt: str, count: int
) -> list[Request]:
    """So many requests for one prompt, whose completions differ."""
    windows = None
    if body.parallel_contexts:
        if body.parallel_branches or body.use_beam_search:
            problem = "goes neither with parallel_branches nor with use_beam_search"
            raise UserError("parallel_contexts", problem, "Leave one out.")
        contexts = [service.tokenize(text) for text in body.parallel_contexts]
        prompt, windows = joined(contexts, prompt)
    service.check_prompt(prompt)
    engine = service.engine
    deadline = None if body.deadline_ms is None else engine.clock() + body.deadline_ms / 1000
    return [
        engine.request(
            prompt,
            sampling,
            sibling=sibling,
            salt=salt,
            adapter=service.adapter(body.model),
            priority=body.priority or 0,
            deadline=deadline,
            windows=windows,
        )
        for sibling in range(count)
    ]
