"""The prompts of a request, each as tokens: clients may send text or tokens, one or several."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from moesaic.serve.api.errors import called
from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.service import Service


def tokens_of(service: Service, prompts: Prompts, field: str = "prompt") -> list[list[int]]:
    found: list[list[int]] = []
    every: list[Any] = [prompts] if alone(prompts) else list(prompts)
    for one in every:
        with called_as(field, prompts, len(found)):
            found.append(service.read(one) if isinstance(one, str) else list(one))
    return found


def alone(prompts: Prompts) -> bool:
    return isinstance(prompts, str) or isinstance(prompts[0], int)


def called_as(field: str, prompts: Prompts, number: int) -> AbstractContextManager[None]:
    """Errors name the prompt that is wrong, if there are several."""
    place = field if alone(prompts) else f"{field}.{number}"
    return called(lambda known: place if known == "prompt" else known)


def texts_of(service: Service, prompts: Prompts, tokens: list[list[int]]) -> list[str]:
    """As they were sent, or as their tokens read."""
    if isinstance(prompts, str):
        return [prompts]
    return [
        sent if isinstance(sent, str) else service.tokenizer.decode(own, special=True)
        for sent, own in zip(prompts if not isinstance(prompts[0], int) else [None], tokens, strict=True)
    ]
