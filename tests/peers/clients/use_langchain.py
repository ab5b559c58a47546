"""LangChain: its chat models for OpenAI's, Anthropic's and Ollama's API."""

from __future__ import annotations

from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Trip(BaseModel):
    """Where to go, and for how long."""

    place: Literal["Bonn", "Ulm"]
    days: int = Field(ge=1, le=9)


@tool
def weather(place: Literal["Bonn", "Ulm"]) -> str:
    """The weather of a place."""
    return f"Rain in {place}"


def chat(at: Any, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=at.v1, api_key=at.key, model=at.model, max_retries=0, **{"max_tokens": 16} | options)


def check_invoke_and_stream(at: Any) -> None:
    whole = chat(at, temperature=0).invoke("Hello there")
    pieces = list(chat(at, temperature=0, stream_usage=True).stream("Hello there"))
    assert "".join(str(piece.content) for piece in pieces) == whole.content
    assert whole.usage_metadata is not None and 1 <= whole.usage_metadata["output_tokens"] <= 16
    assert (
        sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata)
        == (whole.usage_metadata["output_tokens"])
    )


def check_structured_output(at: Any) -> None:
    for method in ("json_schema", "function_calling"):
        found = chat(at, max_tokens=200).with_structured_output(Trip, method=method).invoke("Where to?")
        assert isinstance(found, Trip), method


def check_tools(at: Any) -> None:
    bound = chat(at, max_tokens=200).bind_tools([weather], tool_choice="any")
    message = bound.invoke("Hello there")
    assert isinstance(message, AIMessage)
    call = message.tool_calls[0]
    assert call["name"] == "weather" and set(call["args"]) == {"place"}  # an argument was invented here once
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    after = chat(at).bind_tools([weather]).invoke([HumanMessage("Hello there"), message, result])
    assert isinstance(after, AIMessage)


def check_responses(at: Any) -> None:
    one = chat(at, use_responses_api=True, temperature=0)
    whole = one.invoke("Hello there")
    assert whole.usage_metadata is not None and whole.usage_metadata["output_tokens"] >= 1
    assert "".join(piece.text for piece in one.stream("Hello there")) == whole.text


def check_text_and_embeddings(at: Any) -> None:
    assert OpenAI(base_url=at.v1, api_key=at.key, model=at.model, max_tokens=4, temperature=0).invoke("The number 7 is")
    made = OpenAIEmbeddings(base_url=at.v1, api_key=at.key, model=at.model, check_embedding_ctx_length=False)
    assert len(made.embed_documents(["a", "b"])) == 2


def check_anthropic(at: Any) -> None:
    one = ChatAnthropic(base_url=at.url, api_key=at.key, model=at.model, max_tokens=200, max_retries=0, temperature=0)
    whole = one.invoke("Hello there")
    assert "".join(piece.text for piece in one.stream("Hello there")) == whole.text
    call = one.bind_tools([weather], tool_choice="any").invoke("Hello there").tool_calls[0]
    assert call["name"] == "weather" and set(call["args"]) == {"place"}


def check_ollama(at: Any) -> None:
    one = ChatOllama(base_url=at.url, model=at.model, num_predict=16, temperature=0)
    whole = one.invoke("Hello there")
    assert "".join(str(piece.content) for piece in one.stream("Hello there")) == whole.content
    wider = ChatOllama(base_url=at.url, model=at.model, num_predict=200)
    assert isinstance(wider.with_structured_output(Trip, method="json_schema").invoke("Where to?"), Trip)
