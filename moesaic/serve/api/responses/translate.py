"""A request for a response, with what was said before it, as the same request for a chat completion."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.know import ChosenSearch, FileSearchTool
from moesaic.serve.api.schema.responses import (
    AllowedTools,
    ChosenTool,
    InputFunctionCall,
    InputFunctionOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ObjectFormat,
    PromptFields,
    ResponsesRequest,
    SchemaFormat,
)
from moesaic.serve.api.schema.sampling import ExtraSamplingParams

SHARED = ("temperature", "top_p", "seed", "stop", *ExtraSamplingParams.model_fields)  # by both requests
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
RESULTS = "file_search_call.results"


def as_chat(body: PromptFields, before: Sequence[InputItem] = ()) -> ChatCompletionRequest:
    """`before` are the items of the responses that this one continues. Of a request to count tokens, what the tokens
    depend on."""
    fields: dict[str, Any] = {"model": body.model, "messages": chat_messages(body, before), **tool_fields(body)}
    fields["continue_final_message"] = False  # a response is a turn of its own
    for name in ("parallel_tool_calls", "chat_template_kwargs"):
        if (value := getattr(body, name)) is not None:
            fields[name] = value
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    match body.text.format if body.text else None:
        case ObjectFormat():
            fields["response_format"] = {"type": "json_object"}
        case SchemaFormat(name=name, json_schema=schema, strict=strict):
            named = {"name": name, "schema": schema, "strict": strict}
            fields["response_format"] = {"type": "json_schema", "json_schema": named}
    if isinstance(body, ResponsesRequest):
        fields |= {name: value for name in SHARED if (value := getattr(body, name)) is not None}
        fields["max_tokens"] = body.max_output_tokens
        if body.top_logprobs is not None or LOGPROBS in (body.include or ()):
            fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    chat = ChatCompletionRequest.model_validate(fields)
    chat._sources = body._sources
    return chat


def responses_field(place: str) -> str:
    """What a field of a chat completion is called here."""
    place = re.sub(r"^(tools\.\d+)\.function", r"\1", place)
    place = re.sub(r"^response_format(\.json_schema)?", "text.format", place)
    names = {"messages": "input", "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
    return names.get(place, place)


def tool_fields(body: PromptFields) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    match body.tool_choice:
        case ChosenTool(name=name):
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
        case AllowedTools() | ChosenSearch():
            fields["tool_choice"] = body.tool_choice.model_dump()
        case str(choice):
            fields["tool_choice"] = choice
    if body.tools:
        fields["tools"] = [
            tool.model_dump(exclude_none=True)
            if isinstance(tool, FileSearchTool)
            else {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    return fields


def chat_messages(body: PromptFields, before: Sequence[InputItem] = ()) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    own: Sequence[InputItem] = () if body.input is None else body.input if not isinstance(body.input, str) else ()
    for item in (*before, *own):
        _add(messages, item)
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    for message in messages:
        if message["role"] == "assistant":
            message.setdefault("content", "")
    return messages or [{"role": "user", "content": ""}]


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    """What a model thought, said and called in one turn is one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item:
        case InputMessage(role="assistant") if last is not None and not last.keys() & {"content", "tool_calls"}:
            last["content"] = item.model_dump()["content"]
        case InputMessage():
            messages.append(item.model_dump(include={"role", "content"}))
        case InputFunctionCall():
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            if last is None:
                messages.append(last := {"role": "assistant"})
            last.setdefault("tool_calls", []).append(call)
        case InputFunctionOutput():
            output = item.model_dump()["output"]
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
        case InputReasoning():
            if text := reasoning_text(item):
                messages.append({"role": "assistant", "reasoning_content": text})


def reasoning_text(item: InputReasoning) -> str:
    """What the model thought, by whichever of its fields the client sent back; the template decides whether the model
    is shown it."""
    if item.content:
        return "".join(part.text for part in item.content)
    if item.encrypted_content:
        return unpack(item.encrypted_content)
    return "\n".join(part.text for part in item.summary or ())


PACKED = "moesaic:"


def pack(text: str) -> str:
    """Reasoning in one opaque word, for clients that keep and send back only this. It hides nothing: the same text
    stands beside it."""
    return PACKED + base64.urlsafe_b64encode(text.encode("utf-8", "replace")).decode()


def unpack(packed: str) -> str:
    """Nothing, if it is another server's."""
    try:
        return base64.urlsafe_b64decode(packed.removeprefix(PACKED)).decode() if packed.startswith(PACKED) else ""
    except (binascii.Error, ValueError):
        return ""
