"""A request of the Messages API as the same request for a chat completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.messages import (
    BlockSource,
    CountTokensRequest,
    DocumentBlock,
    FileSearchResultBlock,
    FreeChoice,
    InputMessage,
    MessagesRequest,
    MessagesSearchTool,
    NamedChoice,
    RedactedThinkingBlock,
    SearchResultBlock,
    ServerToolUseBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from moesaic.serve.api.schema.sampling import ExtraSamplingParams

SHARED = ("temperature", "top_p", "seed", "stream", *ExtraSamplingParams.model_fields)  # by both requests
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(body: CountTokensRequest) -> ChatCompletionRequest:
    """Of a request to count tokens, what the tokens depend on."""
    messages = chat_messages(body)
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **tool_fields(body)}
    if messages[-1]["role"] == "assistant":
        fields |= {"continue_final_message": True}
    fields |= thinking_fields(body)
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    form = (body.output_config.format if body.output_config else None) or body.output_format
    if form is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.json_schema}}
    if isinstance(body, MessagesRequest):
        fields |= {name: value for name in SHARED if (value := getattr(body, name)) is not None}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields["user"] = body.metadata.user_id if body.metadata else None
    chat = ChatCompletionRequest.model_validate(fields)
    chat._sources = body._sources
    return chat


def messages_field(place: str) -> str:
    """What a field of a chat completion is called here."""
    place = re.sub(r"^(tools\.\d+)\.function\.parameters", r"\1.input_schema", place)
    place = re.sub(r"^(tools\.\d+)\.function", r"\1", place)
    place = re.sub(r"^response_format(\.json_schema)?", "output_config.format", place)
    return {"stop": "stop_sequences", "reasoning_effort": "output_config.effort"}.get(place, place)


def tool_fields(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            tool.model_dump(exclude={"name", "cache_control"}, exclude_none=True)
            if isinstance(tool, MessagesSearchTool)
            else {
                "type": "function",
                "function": tool.model_dump(include={"name", "description", "strict"}, exclude_none=True)
                | {"parameters": tool.input_schema},
            }
            for tool in body.tools
        ]
    match body.tool_choice:
        case FreeChoice(type=kind):
            fields["tool_choice"] = CHOICES[kind]
        case NamedChoice(name=name):
            fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def thinking_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Whether the template is told to think; one that was not asked follows its own default."""
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is None:
        return {"chat_template_kwargs": variables}
    budget = body.thinking.budget_tokens
    if isinstance(body, MessagesRequest) and budget is not None and budget >= body.max_tokens:
        raise UserError("thinking.budget_tokens", f"must be less than max_tokens, which is {body.max_tokens}")
    if budget is not None:
        variables.setdefault("thinking_budget", budget)
    return {"chat_template_kwargs": variables, "enable_thinking": body.thinking.type != "disabled"}


def chat_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": shown(body.system, "\n\n")})
    for number, message in enumerate(body.messages):
        if message.role == "assistant":
            new = [_assistant(message, f"messages.{number}")]
        else:
            new = _user(message, f"messages.{number}")
        for one in new:
            if messages and _joins(messages[-1], one):
                messages[-1]["content"] += "\n\n" + one["content"]
            else:
                messages.append(one)
    if messages[-1].get("tool_calls"):
        last = f"messages.{len(body.messages) - 1}"
        raise UserError(last, "the last message calls tools", "Send their results as tool_result blocks.")
    return messages


def _joins(before: dict[str, Any], message: dict[str, Any]) -> bool:
    """Turns of one speaker are one turn, as many templates demand."""
    return before["role"] == message["role"] and message["role"] in ("user", "system")


def _assistant(message: InputMessage, place: str) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": "assistant", "content": message.content}
    text, thoughts, calls = "", "", []
    for number, block in enumerate(message.content):
        match block:
            case ThinkingBlock():
                thoughts += block.thinking
            case RedactedThinkingBlock() | ServerToolUseBlock() | FileSearchResultBlock():
                pass
            case ToolUseBlock():
                calls.append({"id": block.id, "function": {"name": block.name, "arguments": block.input}})
            case ToolResultBlock():
                raise UserError(f"{place}.content.{number}", "a tool_result belongs in a message of the user")
            case _:
                text += shown([block])
    found: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        found["reasoning_content"] = thoughts
    if calls:
        found["tool_calls"] = calls
    return found


def _user(message: InputMessage, place: str) -> list[dict[str, Any]]:
    """Results come first: templates expect them right behind the calls."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    for number, block in enumerate(message.content):
        match block:
            case ToolResultBlock():
                text = shown(block.content or "", "\n")
                # Templates know no failed result; the model reads it.
                said = f"Error: {text}" if block.is_error else text
                results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": said})
            case (
                ToolUseBlock()
                | ThinkingBlock()
                | RedactedThinkingBlock()
                | ServerToolUseBlock()
                | FileSearchResultBlock()
            ):
                raise UserError(f"{place}.content.{number}", f"a {block.type} belongs in a message of the assistant")
            case _:
                texts.append(block)
    if texts or not results:
        results.append({"role": message.role, "content": shown(texts, "\n")})
    return results


def shown(content: str | Sequence[Any], between: str = "") -> str:
    """Blocks as the text a model is shown."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for block in content:
        match block:
            case TextBlock():
                parts.append(block.text)
            case DocumentBlock(source=source):
                head = [part for part in (block.title, block.context) if part]
                match source:
                    case TextSource():
                        parts.append("\n".join([*head, source.data]))
                    case BlockSource():
                        parts.append("\n".join([*head, shown(source.content)]))
            case SearchResultBlock():
                parts.append("\n".join([block.title, block.source, shown(block.content)]))
    return between.join(parts)


def marks_cache(body: CountTokensRequest) -> bool:
    """Whether anything in it asks for the prefix cache."""
    if body.cache_control or any(tool.cache_control for tool in body.tools or ()):
        return True
    blocks: list[Any] = [block for block in body.system or () if not isinstance(block, str)]
    for message in body.messages:
        blocks += [block for block in message.content if not isinstance(block, str)]
    return any(getattr(block, "cache_control", None) for block in blocks)
