"""The prompts of a request, each as tokens: clients may send text or tokens, one or several."""

from __future__ import annotations

from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.service import Service


def tokens_of(service: Service, prompts: Prompts) -> list[list[int]]:
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts[0], int):
        prompts = [prompts]
    return [service.read(one) if isinstance(one, str) else list(one) for one in prompts]


def texts_of(service: Service, prompts: Prompts, tokens: list[list[int]]) -> list[str]:
    """As they were sent, or as their tokens read."""
    if isinstance(prompts, str):
        return [prompts]
    return [
        sent if isinstance(sent, str) else service.tokenizer.decode(own, special=True)
        for sent, own in zip(prompts if not isinstance(prompts[0], int) else [None], tokens, strict=True)
    ]
