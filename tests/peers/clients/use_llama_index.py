"""LlamaIndex."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """Where to go, and for how long."""

    place: Literal["Bonn", "Ulm"]
    days: int = Field(ge=1, le=9)


def model(at: Any, **options: Any) -> OpenAILike:
    fixed = {"max_tokens": 16, "temperature": 0.0, "is_chat_model": True, "max_retries": 0, "context_window": 4096}
    return OpenAILike(model=at.model, api_base=at.v1, api_key=at.key, **fixed | options)


def check_chat(at: Any) -> None:
    asked = [ChatMessage(role="user", content="Hello there")]
    whole = model(at).chat(asked)
    pieces = list(model(at).stream_chat(asked))
    assert "".join(piece.delta or "" for piece in pieces) == whole.message.content


def check_complete(at: Any) -> None:
    one = model(at, is_chat_model=False)
    whole = one.complete("The number 7 is")
    assert whole.text and "".join(piece.delta or "" for piece in one.stream_complete("The number 7 is")) == whole.text


def check_structured(at: Any) -> None:
    one = model(at, is_function_calling_model=True, max_tokens=200)
    assert isinstance(one.structured_predict(Trip, PromptTemplate("Where to?")), Trip)


def check_embeddings(at: Any) -> None:
    made = OpenAILikeEmbedding(model_name=at.model, api_base=at.v1, api_key=at.key)
    assert len(made.get_text_embedding("a number")) > 0
    assert len(made.get_text_embedding_batch(["a", "b"])) == 2
