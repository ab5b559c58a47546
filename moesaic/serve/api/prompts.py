"""The prompts of a request, each as tokens: clients may send text or tokens, one or several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.service import Service


def prompt_tokens(
    service: Service, prompts: Prompts, field: str = "prompt", *, special: bool = True
) -> list[list[int]]:
    found: list[list[int]] = []
    every: list[Any] = [prompts] if single(prompts) else list(prompts)
    for one in every:
        with prompt_place(field, prompts, len(found)):
            found.append(service.tokenize(one, special=special) if isinstance(one, str) else list(one))
    return found


def single(prompts: Prompts) -> bool:
    return isinstance(prompts, str) or isinstance(prompts[0], int)


@contextmanager
def prompt_place(field: str, prompts: Prompts, number: int) -> Iterator[None]:
    """Errors name the prompt they were found in, if there are several."""
    try:
        yield
    except UserError as error:
        if error.place == "prompt":
            error.place = field if single(prompts) else f"{field}.{number}"
        raise


def prompt_texts(service: Service, prompts: Prompts, tokens: list[list[int]]) -> list[str]:
    """As they were sent, or as their tokens decode."""
    if isinstance(prompts, str):
        return [prompts]
    return [
        sent if isinstance(sent, str) else service.tokenizer.decode(own, special=True)
        for sent, own in zip(prompts if not isinstance(prompts[0], int) else [None], tokens, strict=True)
    ]
