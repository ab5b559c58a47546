"""LiteLLM, which speaks to the same server in four dialects."""

from __future__ import annotations

import os
from typing import Any

# Or it looks for its price list and for Anthropic's headers on the network.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = os.environ["LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS"] = "True"

import litellm

HELLO = [{"role": "user", "content": "Hello there"}]


def options(at: Any, dialect: str) -> dict[str, Any]:
    base = {"openai": at.v1, "hosted_vllm": at.v1, "anthropic": at.url, "ollama_chat": at.url}[dialect]
    return {"model": f"{dialect}/{at.model}", "api_base": base, "api_key": at.key, "messages": HELLO, "max_tokens": 8}


def check_every_dialect(at: Any) -> None:
    for dialect in ("openai", "hosted_vllm", "anthropic", "ollama_chat"):
        answer = litellm.completion(**options(at, dialect), temperature=0)
        assert answer.choices[0].message.role == "assistant", dialect
        assert 1 <= answer.usage.completion_tokens <= 8, dialect
        pieces = list(litellm.completion(**options(at, dialect), temperature=0, stream=True))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == (answer.choices[0].message.content or ""), dialect


def check_text_completion(at: Any) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{at.model}",
        prompt="The number 7 is",
        max_tokens=4,
        temperature=0,  # a sampled text may be empty
        api_base=at.v1,
        api_key=at.key,
    )
    assert answer.choices[0].text


def check_embedding(at: Any) -> None:
    answer = litellm.embedding(model=f"openai/{at.model}", input=["a", "b"], api_base=at.v1, api_key=at.key)
    assert len(answer.data) == 2 and len(answer.data[0]["embedding"]) > 0


def check_rerank(at: Any) -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{at.model}",
        query="a number",
        documents=["a number", "like it"],
        api_base=at.url,
        api_key=at.key,
    )
    assert sorted(result["index"] for result in answer.results) == [0, 1]


def check_forced_tool(at: Any) -> None:
    tool = {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    }
    answer = litellm.completion(
        **options(at, "openai") | {"max_tokens": 100},
        tools=[{"type": "function", "function": tool}],
        tool_choice="required",
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "add"


def check_errors(at: Any) -> None:
    try:
        litellm.completion(**options(at, "openai") | {"model": "openai/nobody"})
    except litellm.exceptions.NotFoundError:
        return
    raise AssertionError("it was answered")
