"""What rewards ask the policy of its own answer before they judge it, such as CANOE's proxy answer: what follows from a
long answer alone. It replies in the engine it answered in, greedily, and nothing of it is learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moesaic.align.rewards import Reward
from moesaic.errors import UserError
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Request, Sampling
from moesaic.worlds.completions import prompt_tokens
from moesaic.worlds.judges import Answer


def follow_ups(
    engine: Engine, rewards: Sequence[tuple[str, float, Reward]], answers: Sequence[Answer]
) -> dict[str, Request]:
    """Requests for replies, by the question: what is asked of several answers is asked once. There is none for a
    question that is too long."""
    assert engine.tokenizer is not None
    asked: dict[str, int] = {}
    for _, _, reward in rewards:
        for answer in answers:
            for question, tokens in reward.asks(answer).items():
                asked[question] = max(tokens, asked.get(question, 0))
    requests = {}
    for question, tokens in asked.items():
        try:
            prompt = prompt_tokens(engine.tokenizer, [{"role": "user", "content": question}])
            requests[question] = engine.request(prompt, Sampling(max_tokens=tokens, temperature=0.0, seed=0))
        except UserError:
            continue
    return requests


def with_replies(
    engine: Engine, rewards: Sequence[tuple[str, float, Reward]], answers: Sequence[Answer]
) -> Sequence[Answer]:
    """Ask everything at once, and wait."""
    requests = follow_ups(engine, rewards, answers)
    if not requests:
        return answers
    said = engine.complete(list(requests.values()))
    return replied(answers, {question: done.text for question, done in zip(requests, said, strict=True)})


def replied(answers: Sequence[Answer], replies: Mapping[str, str]) -> list[Answer]:
    return [replace(answer, replies=replies) for answer in answers]
