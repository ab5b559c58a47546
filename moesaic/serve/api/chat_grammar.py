"""The grammar of an assistant's message, and who reads it: an answer of the form that was asked for, a tool call where
one must be made (`tool_choice` required, or one tool by name), or either, where the model may choose. A reasoning model
reasons before any of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moesaic.errors import UserError
from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.api.forced_calls import AfterReasoning, CallListReader, NamedCallReader
from moesaic.serve.api.schema.chat import ChatCompletionRequest, Function, NamedTool
from moesaic.serve.api.structured import Special, json_schema, output_grammar
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.grammars.lark import ANY, Rules
from moesaic.serve.parsers import EventReader, Parser

NO_EFFORT = (None, "none", "minimal")
ESCAPED = re.compile(r"\\+u([0-9a-f]{4})")  # as JSON writes what is not ASCII
BLANK = r"/\n{0,2}/"  # after reasoning, and between calls
# Of a tool that declares none.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class MessageForm:
    """`grammar` is None where any text will do; `reader` makes a reader for each completion."""

    grammar: Grammar | None
    reader: Callable[[], EventReader]


@dataclass(frozen=True)
class Speaker:
    """How the model writes: its style of calls, its chat template, and its special tokens."""

    parser: Parser
    tokenizer: Tokenizer
    special: Special
    prefill: str = ""  # the message that the model continues

    def reader(self, tools: Sequence[Any] = (), prompt: str = "") -> EventReader:
        return self.parser.reader(tools, prompt, self.prefill)


def message_form(body: ChatCompletionRequest, prompt: str, speaker: Speaker) -> MessageForm:
    parser = speaker.parser
    forced = forced_tools(body)
    tools = [tool.model_dump() for tool in body.function_tools] if body.tool_choice != "none" else []
    form = output_grammar(body, speaker.special)  # of an answer; wrong ones are refused where there is none, too
    strict = any(tool["function"].get("strict") for tool in tools)
    if not forced and form is None and not strict:
        return MessageForm(None, lambda: speaker.reader(tools, prompt))
    rules = Rules(speaker.special())
    thoughts = _thoughts(body, prompt, speaker, rules)
    ends = tuple(close for _, close in parser.thinks) if thoughts else ()
    if forced:
        named = isinstance(body.tool_choice, NamedTool)
        start = _forced_call(body, forced, rules)

        def forced_reader() -> EventReader:
            inner = NamedCallReader(forced[0].name) if named else CallListReader()
            return AfterReasoning(speaker.reader((), prompt), inner) if thoughts else inner

        grammar = Grammar.of(rules, f"{thoughts}{start}", "tools", resets=ends)
        return MessageForm(grammar, forced_reader)
    if form is None:
        return MessageForm(_strict_calls(tools, parser, rules), lambda: speaker.reader(tools, prompt))
    known = ("think>", *(parser.openings if tools else ()))  # in a regular expression the slash is escaped
    written = ESCAPED.sub(lambda found: chr(int(found[1], 16)), form.text)
    if any(tag in written for tag in known):  # it says itself where reasoning ends, and what a call is
        return MessageForm(form, lambda: speaker.reader(tools, prompt))
    calls = _calls(body, tools, parser, rules) if tools else None
    if not thoughts and calls is None:
        # A reasoning section that the prompt opened does not go on where the grammar knows no end of one.
        return MessageForm(form, lambda: speaker.reader(tools))
    answer = rules.grammar(form.parts, form.unique_keys)
    start = f"{thoughts}({answer} | {calls})" if calls is not None else f"{thoughts}{answer}"
    resets = (*ends, *(parser.openings if calls is not None else ()))
    grammar = Grammar.of(rules, start, form.place, resets)
    return MessageForm(grammar, lambda: speaker.reader(tools, prompt if thoughts else ""))


def _thoughts(body: ChatCompletionRequest, prompt: str, speaker: Speaker, rules: Rules) -> str:
    """The reasoning section that the prompt has opened, or that the model may open if the client asks for reasoning.
    Else there is none: a form is kept from the first token on."""
    parser = speaker.parser
    if (before := parser.before_answer(rules, prompt)) is not None:
        return before
    if not parser.reasoning:
        return ""
    end = parser.end_of_reasoning(prompt, speaker.prefill)
    if end is not None:
        return f"{rules.until(end)} {rules.rule(BLANK)} "
    chosen = body.chat_template_kwargs or {}
    asked = (
        True in (chosen.get("enable_thinking"), chosen.get("thinking"), body.enable_thinking)
        or body.reasoning_effort not in NO_EFFORT
    )
    if not asked or any(prompt.rstrip().endswith(close) for _, close in parser.thinks):
        return ""
    template = speaker.tokenizer.chat_template or ""
    sections = [
        f"{rules.literal(mark)} {rules.until(close)} {rules.rule(BLANK)}"
        for mark, close in parser.thinks
        if mark in template
    ]
    return f"({' | '.join(sections)})? " if sections else ""


# Calls that must be made: by a grammar, so that they cannot fail


def forced_tools(body: ChatCompletionRequest) -> list[Function]:
    """The tools of which one must be called; none if the model may decide, or there is nothing to call."""
    tools = [tool.function for tool in body.function_tools]
    for number, tool in enumerate(tools):
        if _parameters(tool)["type"] != "object":
            raise UserError(_place(number), 'must have "type": "object": a call names its arguments')
    if body.tool_choice in (None, "none", "auto"):
        return []
    if not tools:
        raise UserError("tool_choice", "there are no tools to choose from", "Give tools.")
    if isinstance(body.tool_choice, NamedTool):
        name = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.name == name]
        if not tools:
            raise UserError("tool_choice", f"there is no tool {name!r}")
    return tools


def _forced_call(body: ChatCompletionRequest, tools: Sequence[Function], rules: Rules) -> str:
    """The arguments of the one tool that was named, or a list of calls of any of the tools."""
    places = {tool.function.name: _place(number) for number, tool in enumerate(body.function_tools)}
    arguments = {}
    for tool in tools:
        place = places[tool.name]
        arguments[tool.name] = rules.schema(json_schema(_parameters(tool), place), place)
        Grammar.of(rules, arguments[tool.name], place)  # whichever is wrong is named
    if isinstance(body.tool_choice, NamedTool):
        return arguments[tools[0].name]
    calls = []
    for name, schema in arguments.items():
        head = json.dumps(f'{{"name": "{name}", "parameters": ')
        calls.append(f'{head} {schema} "}}"')
    call = rules.rule(" | ".join(calls))
    more = "" if body.parallel_tool_calls is False else f' (", " {call})*'
    return f'"[" {call}{more} "]"'


# Calls that may be made, in the model's own style


def _calls(body: ChatCompletionRequest, tools: list[dict[str, Any]], parser: Parser, rules: Rules) -> str | None:
    """Calls instead of an answer; None of a model whose style of calls is not known."""
    after = parser.call_rules(rules, tools)
    if after is None:
        after = dict.fromkeys(parser.openings, rules.rule(ANY))
        return " | ".join(f"{rules.literal(tag)} {rest}" for tag, rest in after.items()) or None
    call = rules.rule(" | ".join(f"{rules.literal(tag)} {rest}" for tag, rest in after.items()))
    return call if body.parallel_tool_calls is False else f"{call} ({rules.rule(BLANK)} {call})*"


def _strict_calls(tools: list[dict[str, Any]], parser: Parser, rules: Rules) -> Grammar | None:
    """Any text, in which calls have the parameters of their tools: where a client asks for that with `strict`."""
    # Where a brace alone opens a call, content would have none.
    after = {tag: rest for tag, rest in (parser.call_rules(rules, tools) or {}).items() if tag not in parser.leading}
    if not after:
        return None
    call = rules.rule(" | ".join(f"{rules.until(tag)} {rest}" for tag, rest in after.items()))
    text = rules.without(*after)
    return Grammar.of(rules, f"({call})* {text}", "tools", resets=tuple(after))


def _parameters(tool: Function) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object, whether it says so or not."""
    return {"type": "object"} | (tool.parameters or NO_PARAMETERS)


def _place(number: int) -> str:
    return f"tools.{number}.function.parameters"
