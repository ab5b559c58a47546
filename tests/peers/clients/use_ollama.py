"""Ollama's own client."""

from __future__ import annotations

import json
from typing import Any

import ollama

HELLO = [{"role": "user", "content": "Hello there"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"place": {"enum": ["Bonn", "Ulm"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["place", "days"],
}


def client(at: Any) -> ollama.Client:
    return ollama.Client(host=at.url)


def check_chat(at: Any) -> None:
    answer = client(at).chat(model=at.model, messages=HELLO, options={"num_predict": 8, "temperature": 0})
    assert answer.message.role == "assistant" and answer.done and answer.done_reason in ("length", "stop")
    assert answer.eval_count and answer.eval_count <= 8 and answer.prompt_eval_count and answer.total_duration


def check_chat_stream_is_the_answer(at: Any) -> None:
    asked: Any = {"model": at.model, "messages": HELLO, "options": {"num_predict": 24, "temperature": 0}}
    whole = client(at).chat(**asked)
    pieces = list(client(at).chat(**asked, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert pieces[-1].done and not any(piece.done for piece in pieces[:-1])


def check_generate(at: Any) -> None:
    asked: Any = {
        "model": at.model,
        "prompt": "The number 7 is",
        "raw": True,
        "options": {"num_predict": 8, "temperature": 0},
    }
    whole = client(at).generate(**asked)
    pieces = list(client(at).generate(**asked, stream=True))
    assert whole.response and "".join(piece.response for piece in pieces) == whole.response


def check_format(at: Any) -> None:
    answer = client(at).chat(model=at.model, messages=HELLO, format=SCHEMA, options={"num_predict": 200})
    found = json.loads(answer.message.content or "")
    assert found["place"] in ("Bonn", "Ulm") and 1 <= found["days"] <= 9 and len(found) == 2


def check_embed(at: Any) -> None:
    one, two = client(at).embed(model=at.model, input=["a number", "no number"]).embeddings
    assert len(one) == len(two) > 0 and list(one) != list(two)
    assert abs(sum(x * x for x in one) - 1) < 1e-4
    assert list(client(at).embeddings(model=at.model, prompt="a number").embedding)


def check_models(at: Any) -> None:
    (listed,) = client(at).list().models
    assert listed.model == f"{at.model}:latest"
    shown = client(at).show(at.model)
    assert shown.details is not None and "completion" in (shown.capabilities or [])
    assert [model.model for model in client(at).ps().models] == [listed.model]
    assert client(at).chat(model=listed.model, messages=HELLO, options={"num_predict": 1}).done


def check_errors(at: Any) -> None:
    for call in (
        lambda: client(at).chat(model="nobody", messages=HELLO),
        lambda: client(at).pull("nobody"),
    ):
        try:
            call()
        except ollama.ResponseError as error:
            assert 400 <= error.status_code < 600 and error.error
        else:
            raise AssertionError("it was answered")


async def check_async(at: Any) -> None:
    one = ollama.AsyncClient(host=at.url)
    answer = await one.chat(model=at.model, messages=HELLO, options={"num_predict": 4})
    assert answer.done
    pieces = [
        piece async for piece in await one.generate(model=at.model, prompt="A", stream=True, options={"num_predict": 4})
    ]
    assert pieces[-1].done
