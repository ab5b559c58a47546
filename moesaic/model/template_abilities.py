"""What a chat template can do, found out by giving it small conversations: templates do not say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moesaic.errors import UserError

Render = Callable[[Sequence[dict[str, Any]], Mapping[str, Any]], str]  # of messages and other variables

NAME = "probe_of_tools"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}},
    },
}
USER = {"role": "user", "content": "A question."}
SYSTEM = {"role": "system", "content": "A rule."}


def takes_tools(render: Render) -> bool:
    """Whether tools that are given reach the text. What fails on every conversation is left to say why itself."""
    shown = [_attempt(render, messages, [TOOL]) for messages in ([USER], [SYSTEM, USER])]
    texts = [text for text in shown if text is not None]
    return any(NAME in text for text in texts) or not texts


def wants_arguments_as_text(render: Render) -> bool:
    """Whether the arguments of earlier calls must be JSON text: an object fails, or is written as Python writes it."""

    def shown(arguments: Any) -> str | None:
        function = {"name": NAME, "arguments": arguments}
        calls = [{"id": "call00001", "type": "function", "function": function}]
        return _attempt(render, [USER, {"role": "assistant", "content": "", "tool_calls": calls}], [TOOL])

    as_object, as_text = shown({"key": "a value"}), shown('{"key": "a value"}')
    return as_text is not None and (as_object is None or "{'key': 'a value'}" in as_object)


def _attempt(render: Render, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
    try:
        return render(messages, {"tools": tools})
    except UserError:
        return None
