"""A client's wishes as the engine's: how to sample, for whom, how urgently."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.errors import called
from moesaic.serve.api.schema.sampling import SamplingForm
from moesaic.serve.api.service import Service
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.sampling_defaults import TUNED, recommended
from moesaic.strict import found


def sampling(
    form: SamplingForm,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> Sampling:
    values = recommended(tokenizer)
    for name in (*TUNED, "presence_penalty", "frequency_penalty", "seed", "ignore_eos", "min_tokens"):
        if (given := getattr(form, name)) is not None:
            values[name] = given
    values["top_k"] = max(0, values.get("top_k", 0))
    if form.stream and form.prompt_logprobs is not None:
        raise UserError("prompt_logprobs", "have no place in a stream", "Ask for the whole answer.")
    if max_tokens is not None and (form.min_tokens or 0) > max_tokens:
        raise UserError("min_tokens", f"is {form.min_tokens}, and {max_tokens} is the most that was asked for")
    return Sampling(
        max_tokens=max_tokens,
        logit_bias=_bias(form.logit_bias or {}),
        stop=(form.stop,) if isinstance(form.stop, str) else tuple(form.stop or ()),
        stop_tokens=frozenset(form.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        **values,
    )


def requests(
    service: Service, form: SamplingForm, prompt: Sequence[int], wishes: Sampling, *, salt: str, count: int
) -> list[Request]:
    """So many requests for one prompt, whose answers differ."""
    service.check_prompt(prompt)
    engine = service.engine
    deadline = None if form.deadline_ms is None else engine.clock() + form.deadline_ms / 1000
    with called(lambda place: "stop_token_ids" if place == "stop_tokens" else place):
        return [
            engine.request(
                prompt,
                wishes,
                sibling=sibling,
                salt=salt,
                adapter=service.adapter(form.model),
                priority=form.priority or 0,
                deadline=deadline,
            )
            for sibling in range(count)
        ]


def _bias(given: dict[str, float]) -> dict[int, float]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise UserError("logit_bias", f"its keys must be token numbers, and {found(token)} is none")
    return {int(token): bias for token, bias in given.items()}
