"""Ollama's chat and generate requests as requests for a chat or a completion."""

from __future__ import annotations

from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.errors import ApiError, translated
from moesaic.serve.api.ollama.names import known
from moesaic.serve.api.ollama.schema import ChatRequest, GenerateRequest, GeneratingRequest, Message
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.schema.completions import CompletionRequest
from moesaic.serve.api.service import Service

LEAST_TOP_P = 1e-6  # keeps the likeliest token, as 0 does there
SAME = (  # options that have the same name in both
    *("temperature", "top_k", "min_p", "typical_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau", "mirostat_eta"),
)
PLACES = {"max_tokens": "options.num_predict", "repetition_penalty": "options.repeat_penalty", "prompt": "prompt"}


def field_name(place: str) -> str:
    """What a field of a chat or a completion is called here."""
    if place.startswith(("response_format", "json_schema", "structured_outputs")):
        return "format"
    if place in (*SAME, "top_p", "seed", "stop"):
        return f"options.{place}"
    return PLACES.get(place, place)


def sampling(body: GeneratingRequest) -> dict[str, Any]:
    """Fields of both kinds of completion."""
    options, fields = body.options, {}
    if options is not None:
        fields = {name: value for name in SAME if (value := getattr(options, name)) is not None}
        if options.num_predict is not None and options.num_predict > 0:
            fields["max_tokens"] = options.num_predict
        if options.top_p is not None:
            fields["top_p"] = max(LEAST_TOP_P, options.top_p)
        if options.seed is not None and options.seed >= 0:
            fields["seed"] = options.seed
        stop = [options.stop] if isinstance(options.stop, str) else options.stop or []
        fields["stop"] = [word for word in stop if word] or None
    match body.format:
        case "json":
            fields["response_format"] = {"type": "json_object"}
        case dict() as schema if schema:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return fields


def chat_fields(service: Service, body: GeneratingRequest) -> dict[str, Any]:
    fields = {"model": known(service, body.model), **sampling(body)}
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.think is not None:
        thinks = body.think is not False
        if thinks and not can_think(service):
            raise ApiError(400, f'"{body.model}" does not support thinking', param="think", code="unsupported")
        # By either name, templates switch thinking on and off.
        fields["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks}
        if isinstance(body.think, str):
            fields["reasoning_effort"] = body.think
    return fields


def can_think(service: Service) -> bool:
    template = service.tokenizer.chat_template or ""
    return "think" in template or "reasoning_effort" in template


def as_chat(service: Service, body: ChatRequest) -> ChatCompletionRequest:
    messages = [chat_message(message) for message in body.messages]
    fields = chat_fields(service, body) | {"messages": messages}
    if body.tools:
        given = [{key: value for key, value in tool.function.items() if value is not None} for tool in body.tools]
        fields["tools"] = [{"type": "function", "function": function} for function in given]
    return translated(ChatCompletionRequest, fields)


def chat_message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role.lower(), "content": message.content or ""}
    if message.thinking:
        plain["reasoning_content"] = message.thinking
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
            for call in message.tool_calls
        ]
    if message.tool_name:
        plain["name"] = message.tool_name
    if message.tool_call_id:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def generate_as_chat(service: Service, body: GenerateRequest) -> ChatCompletionRequest:
    """One turn, with the model's chat template."""
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt or ""})
    return translated(ChatCompletionRequest, chat_fields(service, body) | {"messages": messages})


def generate_as_completion(service: Service, body: GenerateRequest) -> CompletionRequest:
    """A prompt as it is, or with what is to follow."""
    for name in ("system", "context") if body.raw else ("context",):
        if getattr(body, name):
            raise UserError(name, "cannot stand beside " + ("raw" if body.raw else "suffix"), "Leave one out.")
    fields = {"model": known(service, body.model), "max_tokens": None, **sampling(body)}
    fields |= {"prompt": body.prompt or "", "suffix": body.suffix or None}
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return translated(CompletionRequest, fields)
