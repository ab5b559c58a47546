"""The sampling parameters of a request, as the engine takes them: OpenAI's fields, the model's own defaults, and the
grammar that structured outputs or a required tool call ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.sampler_params import logit_bias, sampler_params
from moesaic.serve.api.schema.chat import ChatCompletionRequest, Function, NamedTool
from moesaic.serve.api.schema.sampling import (
    MAX_GRAMMAR_CHARS,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from moesaic.serve.api.service import Service
from moesaic.serve.core.grammar import WHITESPACE, Grammar
from moesaic.serve.core.request import Request, Sampling

TUNED = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")
SPACES = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
# Of a tool that declares none.
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def sampling_params(
    service: Service,
    body: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Grammar | None = None,
) -> Sampling:
    values = dict(service.sampling_defaults)
    for name in (*TUNED, "seed", "ignore_eos", "min_tokens"):
        if (given := getattr(body, name)) is not None:
            values[name] = given
    values |= sampler_params(body)
    values["top_k"] = max(0, values.get("top_k", 0))
    if body.stream and body.prompt_logprobs is not None:
        raise UserError("prompt_logprobs", "cannot be streamed", "Leave out stream.")
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise UserError("min_tokens", f"is {body.min_tokens}, which is more than the maximum of {max_tokens}")
    return Sampling(
        max_tokens=max_tokens,
        logit_bias=logit_bias(body.logit_bias or {}, service.engine.tokenizer),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_tokens=frozenset(body.stop_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        **values,
    )


def engine_requests(
    service: Service, body: GenerationRequest, prompt: Sequence[int], sampling: Sampling, *, salt: str, count: int
) -> list[Request]:
    """So many requests for one prompt, whose completions differ."""
    service.check_prompt(prompt)
    engine = service.engine
    deadline = None if body.deadline_ms is None else engine.clock() + body.deadline_ms / 1000
    return [
        engine.request(
            prompt,
            sampling,
            sibling=sibling,
            salt=salt,
            adapter=service.adapter(body.model),
            priority=body.priority or 0,
            deadline=deadline,
        )
        for sibling in range(count)
    ]


# Structured outputs


def output_grammar(body: GenerationRequest) -> Grammar | None:
    """The grammar of structured outputs, in any of the ways clients ask for them; None if any text will do."""
    grammars: list[Grammar] = []

    def add(above: str, json_schema: Any, regex: str | None, choice: list[str] | None, lark: str | None) -> None:
        if json_schema is not None:
            grammars.append(json_grammar(json_schema, f"{above}json"))
        if regex is not None:
            grammars.append(Grammar.regex(regex, f"{above}regex"))
        if choice is not None:
            grammars.append(Grammar.choice(choice, f"{above}choice"))
        if lark is not None:
            grammars.append(Grammar.lark(lark, f"{above}grammar"))

    match body.response_format:
        case JsonObjectFormat():
            grammars.append(Grammar.json(None, "response_format"))
        case JsonSchemaFormat(json_schema=requested):
            place = "response_format.json_schema.schema"
            if requested.json_schema is None:
                raise UserError(place, "is missing")
            grammars.append(json_grammar(requested.json_schema, place))
    add("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if (outputs := body.structured_outputs) is not None:
        add("structured_outputs.", outputs.json_schema, outputs.regex, outputs.choice, outputs.grammar)
        if outputs.json_object:
            grammars.append(Grammar.json(None, "structured_outputs.json_object"))
    if len(grammars) > 1:
        others = ", ".join(grammar.place for grammar in grammars[1:])
        raise UserError(grammars[0].place, f"cannot be followed together with {others}", "Give one.")
    return grammars[0] if grammars else None


def json_grammar(given: dict[str, Any] | str, place: str) -> Grammar:
    """Of a JSON schema whose size can be compiled in reasonable time."""
    schema = json_object(given) if isinstance(given, str) else given
    if schema is None:
        raise UserError(place, "is not a JSON schema")
    if len(json.dumps(schema)) > MAX_GRAMMAR_CHARS:
        raise UserError(place, f"is longer than {MAX_GRAMMAR_CHARS} characters")
    return Grammar.json(schema, place)


def json_object(text: str) -> dict[str, Any] | None:
    """None if the text is no JSON object."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


# Tool calls that must be made (`tool_choice` required, or one tool by name): by a grammar, so that they cannot fail


def forced_tools(body: ChatCompletionRequest) -> list[Function]:
    """The tools of which one must be called; none if the model may decide, or there is nothing to call."""
    tools = [tool.function for tool in body.tools or ()]
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


def call_grammar(body: ChatCompletionRequest, tools: Sequence[Function]) -> Grammar:
    """The arguments of the one tool that was named, or a list of calls of any of the tools."""
    arguments = [
        json_grammar(_parameters(tool.function), _place(number))
        for number, tool in enumerate(body.tools or ())
        if tool.function in tools
    ]
    if isinstance(body.tool_choice, NamedTool):
        return arguments[0]
    more = "" if body.parallel_tool_calls is False else ' (", " call)*'
    lines = [f'start: "[" call{more} "]"', "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "parameters": ')
        schema = json.dumps(SPACES | _parameters(tool), ensure_ascii=False)
        lines += [f'call_{number}: {head} parameters_{number} "}}"', f"parameters_{number}: %json {schema}"]
    return Grammar.lark("\n".join(lines), "tools")


def _parameters(tool: Function) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object, whether it says so or not."""
    return {"type": "object"} | (tool.parameters or NO_PARAMETERS)


def _place(number: int) -> str:
    return f"tools.{number}.function.parameters"
