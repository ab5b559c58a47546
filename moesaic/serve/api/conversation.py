"""The prompt of a chat: the messages as the model's chat template writes them, and where the completion begins, which
may be in the middle of the last message."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from moesaic.errors import UserError
from moesaic.model.template_abilities import takes_tools
from moesaic.model.tokenizer import SPECIAL, Tokenizer
from moesaic.serve.api.prompts import one_prompt
from moesaic.serve.api.schema.chat import AllowedTools, ChatCompletionRequest, Message, NamedTool, Tool
from moesaic.serve.api.schema.know import ChosenSearch
from moesaic.serve.api.service import Service
from moesaic.serve.api.structured import json_object
from moesaic.serve.core.request import check_tokens
from moesaic.serve.parsers import Parser, detect

# Variables of a chat template that the request's other fields, or the tokenizer, set.
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "self", "reply", *SPECIAL)


@dataclass(frozen=True)
class Conversation:
    """`prefill` is the last message where the completion continues it."""

    text: str
    prefill: str = ""
    calls: int = 0  # that were made before


def prompt_text(body: ChatCompletionRequest, tokenizer: Tokenizer) -> str:
    """The conversation by the model's chat template."""
    return conversation(body, tokenizer).text


def conversation(
    body: ChatCompletionRequest, tokenizer: Tokenizer, parser: Parser | None = None, *, trust_template: bool = False
) -> Conversation:
    body = with_plain_tools(body)
    if body.chat_template is not None and not trust_template:
        remedy = "Leave it out, or start the server with --trust-request-chat-template."
        raise UserError("chat_template", "this server takes none from requests", remedy)
    extra = _variables(body)
    continued = continues(body)
    if body.function_tools and body.tool_choice != "none":
        _check_tools(body, tokenizer)
        extra["tools"] = [tool.model_dump(exclude_none=True) for tool in body.function_tools]
    for number, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise UserError(f"messages.{number}.content", "missing", "Only an assistant's message may have none.")
    as_text = any(message.tool_calls for message in body.messages) and tokenizer.wants_arguments_as_text
    messages: Sequence[dict[str, Any]] = [_template_message(message, as_text) for message in body.messages]
    messages = (parser or detect(body.chat_template or tokenizer.tool_template)).with_ids(messages)
    reply = body.add_generation_prompt and not continued
    try:
        text = tokenizer.render(messages, extra, reply=reply, continued=continued, template=body.chat_template)
    except UserError as error:
        error.place = "messages"  # the file the template is in does not concern the client
        raise
    prefill = messages[-1]["content"] if continued and messages[-1]["role"] == "assistant" else ""
    return Conversation(text, prefill, sum(len(message.tool_calls or ()) for message in body.messages))


def chat_prompt(
    service: Service, body: ChatCompletionRequest, parser: Parser, max_tokens: int | None
) -> tuple[Conversation, list[int]]:
    """The conversation and its tokens: those of its text, or those that were given instead of it."""
    tokenizer = service.tokenizer
    if (given := body.prompt_token_ids) is not None:
        check_tokens("prompt_token_ids", given, service.engine.model.config.vocab)
        prompt = one_prompt(service, given, body, max_tokens, special=False)
        return Conversation(tokenizer.decode(prompt, special=True)), prompt
    trust = service.settings.trust_request_chat_template
    begun = conversation(body, tokenizer, parser, trust_template=trust)
    return begun, one_prompt(service, begun.text, body, max_tokens, special=bool(body.add_special_tokens))


def continues(body: ChatCompletionRequest) -> bool:
    """Whether the completion goes on with the last message: as the request says, else where the assistant has it."""
    last, given = body.messages[-1], body.model_fields_set
    asked = body.add_generation_prompt and "add_generation_prompt" in given
    if body.continue_final_message and asked:
        problem = "cannot be set together with add_generation_prompt, which begins another message"
        raise UserError("continue_final_message", problem, "Leave one out.")
    if body.continue_final_message is not None:
        return body.continue_final_message
    return (
        last.role == "assistant"
        and bool(last.content)
        and not last.tool_calls
        and body.add_generation_prompt
        and not asked
    )


def with_plain_tools(body: ChatCompletionRequest) -> ChatCompletionRequest:
    """The same request, whose tools are neither functions, as they once were, nor chosen from a list."""
    changed: dict[str, Any] = {}
    if body.functions is not None:
        if body.tools is not None:
            raise UserError("functions", "cannot be given together with tools", "Give tools.")
        chosen = body.function_call
        changed = {
            "tools": [Tool(type="function", function=function) for function in body.functions] or None,
            "tool_choice": chosen
            if chosen is None or isinstance(chosen, str)
            else NamedTool(type="function", function=chosen),
            "functions": None,
            "function_call": None,
            "parallel_tool_calls": False,
        }
    elif body.function_call not in (None, "none", "auto"):
        raise UserError("function_call", "there are no functions", "Give functions, or tools and tool_choice.")
    if isinstance(choice := body.tool_choice, AllowedTools):
        names = [tool.name for tool in choice.allowed]
        known = {tool.function.name for tool in body.function_tools}
        for name in names:
            if name not in known:
                raise UserError("tool_choice", f"allows {name!r}, and there is no such tool", "Name some of the tools.")
        tools = [tool for tool in body.function_tools if tool.function.name in names]
        changed = {"tools": tools or None, "tool_choice": choice.chosen_mode if tools else "none"}
    if body.search_tools:  # the server has searched: the model calls functions only
        functions = changed.get("tools", body.function_tools)
        searched = isinstance(body.tool_choice, ChosenSearch) or not functions
        changed = {"tools": functions or None} | changed | ({"tool_choice": None} if searched else {})
    return body.model_copy(update=changed) if changed else body


def _variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """Those of the template that the request sets."""
    extra: dict[str, Any] = dict(body.chat_template_kwargs or {})
    for name in RESERVED:
        if name in extra:
            raise UserError(f"chat_template_kwargs.{name}", "is set by another field", "Leave it out here.")
    thinking = body.enable_thinking
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none" and thinking is None:
            thinking = False
    if thinking is not None:
        for name in ("enable_thinking", "thinking"):  # by family
            extra.setdefault(name, thinking)
    if body.documents is not None:
        extra["documents"] = body.documents
    return extra


def _check_tools(body: ChatCompletionRequest, tokenizer: Tokenizer) -> None:
    """A call that is forced needs no template: a grammar writes it. Otherwise the model must hear of the tools."""
    if body.tool_choice not in (None, "auto"):
        return
    template = body.chat_template
    taken = takes_tools(partial(tokenizer.render, template=template)) if template else tokenizer.takes_tools
    if not taken and (template or tokenizer.chat_template) is not None:
        problem = "the model's chat template takes no tools, so the model would not hear of them"
        remedy = (
            "Give a template that does (serve --chat-template FILE), force a call by tool_choice, or leave tools out."
        )
        raise UserError("tools", problem, remedy)


def _template_message(message: Message, arguments_as_text: bool) -> dict[str, Any]:
    """As templates expect it: text in one piece, arguments as the objects they stand for, unless they must be text."""
    plain = message.model_dump(exclude={"refusal", "function_call"}, exclude_none=True)
    content = message.content or message.refusal or ""
    plain["content"] = "\n".join(part.text for part in content) if isinstance(content, list) else content
    plain["role"] = {"developer": "system", "function": "tool"}.get(message.role, message.role)  # newer and older names
    if (thoughts := message.reasoning_content or message.reasoning) is not None:
        plain |= {"reasoning_content": thoughts, "thinking": thoughts}  # by family, as transformers has it
    calls = plain.get("tool_calls", [])
    if message.function_call is not None:
        calls = [*calls, {"type": "function", "function": message.function_call.model_dump()}]
        plain["tool_calls"] = calls
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str) and not arguments_as_text:
            if (parsed := json_object(arguments or "{}")) is not None:
                call["function"]["arguments"] = parsed
        elif arguments_as_text:
            call["function"]["arguments"] = arguments or "{}" if isinstance(arguments, str) else json_text(arguments)
    return plain


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
