"""The prompts of a request, each as tokens: clients may send text or tokens, one or several, and have them cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.completions import Prompts
from moesaic.serve.api.schema.tokens import TokenFields
from moesaic.serve.api.service import CHARS_PER_TOKEN, Service


def prompt_tokens(
    service: Service,
    prompts: Prompts,
    body: TokenFields,
    max_tokens: int | None,
    *,
    special: bool = True,
) -> list[list[int]]:
    found: list[list[int]] = []
    every: list[Any] = [prompts] if single(prompts) else list(prompts)
    for one in every:
        with prompt_place("prompt", prompts, len(found)):
            found.append(one_prompt(service, one, body, max_tokens, special=special))
    return found


def one_prompt(
    service: Service, prompt: str | Sequence[int], body: TokenFields, max_tokens: int | None, *, special: bool
) -> list[int]:
    """With room for so many tokens of a completion, where the request asks for truncation."""
    most = min(service.max_prompt, service.engine.max_length - max(1, max_tokens or 1))
    keep = tokens_to_keep(body.truncate_prompt_tokens, most)
    return tokens_of(service, prompt, keep, left=body.truncation_side != "right", special=special)


def tokens_to_keep(asked: int | None, most: int) -> int | None:
    """What `truncate_prompt_tokens` means where a prompt may have at most so many tokens; None: all."""
    if asked is None:
        return None
    if asked == 0 or asked > most:
        problem = f"must be between 1 and {most}, the tokens a prompt may have here, or -1 for as many; not {asked}"
        raise UserError("truncate_prompt_tokens", problem)
    return max(1, most) if asked == -1 else asked


def tokens_of(
    service: Service, prompt: str | Sequence[int], keep: int | None, *, left: bool, special: bool
) -> list[int]:
    """`left` is the side that is cut off. What the tokenizer puts around every text stays."""
    if keep is None:
        return service.tokenize(prompt, special=special) if isinstance(prompt, str) else list(prompt)
    if not isinstance(prompt, str):
        return list(prompt[-keep:] if left else prompt[:keep])
    # What is cut off anyway is not tokenized; twice as much, because the last word may be cut.
    far = 2 * CHARS_PER_TOKEN * keep
    text = prompt[-far:] if left else prompt[:far]
    tokens = service.tokenizer.encode(text, special=special)
    if len(tokens) <= keep:
        return tokens
    plain = service.tokenizer.encode(text, special=False)
    start = _begins_at(tokens, plain)
    if start is None:
        return tokens[-keep:] if left else tokens[:keep]
    head, tail = tokens[:start], tokens[start + len(plain) :]
    room = max(0, keep - len(head) - len(tail))
    own = plain[len(plain) - room :] if left else plain[:room]
    return [*head, *own, *tail][:keep]


def _begins_at(tokens: list[int], plain: list[int]) -> int | None:
    """Where the text's own tokens begin among those with special ones around."""
    extra = len(tokens) - len(plain)
    return next((start for start in range(extra + 1) if tokens[start : start + len(plain)] == plain), None)


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


def prompt_texts(service: Service, prompts: Prompts, tokens: list[list[int]], truncated: bool) -> list[str]:
    """As they were sent, or as their tokens decode."""
    every: list[Any] = [prompts] if single(prompts) else list(prompts)
    return [
        sent if isinstance(sent, str) and not truncated else service.tokenizer.decode(own, special=True)
        for sent, own in zip(every, tokens, strict=True)
    ]
