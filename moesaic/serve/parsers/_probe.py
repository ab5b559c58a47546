"""A template whose words name no parser is given a conversation with a call: whoever reads the call back from what it
writes is its parser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from moesaic.model.chat_template import compiled
from moesaic.serve.parsers._events import Message, Tools

NAME, ARGUMENTS = "probe_of_calls", {"key": "a value"}
PARAMETERS = {"type": "object", "properties": {"key": {"type": "string", "description": "A key."}}}
TOOLS: Tools = [{"type": "function", "function": {"name": NAME, "description": "A probe.", "parameters": PARAMETERS}}]
QUESTION = "What is it, then?"


def written_calls(template: str) -> Iterator[str]:
    """What a template makes of a call; nothing if it fails, or shows none."""
    for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
        call = {"id": "call00001", "type": "function", "function": {"name": NAME, "arguments": arguments}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [{"role": "user", "content": QUESTION}, answer]
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "")
        try:
            text = compiled(template).render(
                messages=messages, tools=TOOLS, documents=None, add_generation_prompt=False, **special
            )
        except Exception:  # a template is a program, and may fail in any way a program can
            continue
        turn = text.rpartition(QUESTION)[2]
        if NAME in turn:
            yield turn


def reads_back(parse: Callable[[str, Tools], Message], turn: str) -> bool:
    """Whether a parser finds the very call."""
    return [(call.name, json.loads(call.arguments)) for call in parse(turn, TOOLS).calls] == [(NAME, ARGUMENTS)]
