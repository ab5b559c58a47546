"""A conversation as the tokens a model was trained on, by its chat template."""

from __future__ import annotations

import json
from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import SPECIAL, Tokenizer
from moesaic.serve.api.errors import called
from moesaic.serve.api.schema.chat import ChatRequest, Message

# What a template is given anyway: by the request, or by the model's own tokenizer.
OURS = ("messages", "tools", "reply", "add_generation_prompt", "self", *SPECIAL)


def prompt_text(form: ChatRequest, tokenizer: Tokenizer) -> str:
    extra: dict[str, Any] = dict(form.chat_template_kwargs or {})
    for name in OURS:
        if name in extra:
            raise UserError(f"chat_template_kwargs.{name}", "is said elsewhere", "Leave it out here.")
    if form.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", form.reasoning_effort)
    if form.tools and form.tool_choice != "none":
        extra["tools"] = [tool.model_dump(exclude_none=True) for tool in form.tools]
    for number, message in enumerate(form.messages):
        if message.content is None and message.role != "assistant":
            raise UserError(f"messages.{number}.content", "missing", "Only an assistant may say nothing.")
    messages = [_plain(message) for message in form.messages]
    with called(lambda place: "messages"):  # the file the template is in is not the client's business
        return tokenizer.chat(messages, reply=form.add_generation_prompt, **extra)


def _plain(message: Message) -> dict[str, Any]:
    """As templates expect it: text in one piece, arguments as the objects they stand for."""
    plain = message.model_dump(exclude={"refusal"}, exclude_none=True)
    content = message.content or message.refusal or ""
    plain["content"] = "".join(part.text for part in content) if isinstance(content, list) else content
    if message.role == "developer":  # OpenAI's newer name of it
        plain["role"] = "system"
    for call in plain.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(given: str | dict[str, Any]) -> Any:
    if isinstance(given, dict):
        return given
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return found if isinstance(found, dict) else given
