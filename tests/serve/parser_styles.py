"""Tool calls as models of every style write them: what their chat templates make of a call, on one line each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

Calls = Sequence[tuple[str, dict[str, Any]]]  # name and arguments


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value: Any) -> str:
    """A value where strings have no quotes."""
    return value if isinstance(value, str) else text_of(value)


def objects(calls: Calls, *, name: str = "name", arguments: str = "arguments") -> list[str]:
    return [text_of({name: called, arguments: given}) for called, given in calls]


def each(form: Callable[[str, dict[str, Any]], str], between: str = "\n") -> Callable[[Calls], str]:
    return lambda calls: between.join(form(name, arguments) for name, arguments in calls)


def json_list(before: str, after: str = "", **names: str) -> Callable[[Calls], str]:
    return lambda calls: f"{before}[{', '.join(objects(calls, **names))}]{after}"


def pairs(form: str, arguments: dict[str, Any], between: str = "") -> str:
    return between.join(form.replace("KEY", key).replace("VALUE", plain(value)) for key, value in arguments.items())


def python(calls: Calls) -> str:
    return ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls
    )


def glm(name: str, given: dict[str, Any]) -> str:
    form = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
    return f"<tool_call>{name}\n{pairs(form, given)}</tool_call>"


def hunyuan(name: str, given: dict[str, Any]) -> str:
    form = "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n"
    return f"<tool_call:opensource>{name}<tool_sep:opensource>\n{pairs(form, given)}</tool_call:opensource>"


def qwen3_coder(name: str, given: dict[str, Any], word: str = "tool_call") -> str:
    inside = pairs("<parameter=KEY>\nVALUE\n</parameter>\n", given)
    return f"<{word}>\n<function={name}>\n{inside}</function>\n</{word}>"


def invoke(name: str, given: dict[str, Any], prefix: str = "") -> str:
    inside = pairs(f'<{prefix}parameter name="KEY">VALUE</{prefix}parameter>\n', given)
    return f'<{prefix}invoke name="{name}">\n{inside}</{prefix}invoke>'


def dsml(name: str, given: dict[str, Any]) -> str:
    inside = ""
    for key, value in given.items():
        string = text_of(isinstance(value, str))
        inside += f'<｜DSML｜parameter name="{key}" string="{string}">{plain(value)}</｜DSML｜parameter>\n'
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>'


def kimi_k3(name: str, given: dict[str, Any]) -> str:
    inside = ""
    for key, value in given.items():
        kind = "string" if isinstance(value, str) else "number"
        inside += f'<|open|>argument key="{key}" type="{kind}"<|sep|>{plain(value)}<|close|>argument<|sep|>'
    return f'<|open|>call tool="{name}" index="1"<|sep|>{inside}<|close|>call<|sep|>'


def nested(value: Any) -> str:
    mark = "]<]minimax[>["
    if isinstance(value, dict):
        return "".join(f"{mark}<{key}>{nested(inner)}{mark}</{key}>" for key, inner in value.items())
    if isinstance(value, list):
        return "".join(f"{mark}<item>{nested(inner)}{mark}</item>" for inner in value)
    return plain(value)


def minimax_m3(calls: Calls) -> str:
    mark = "]<]minimax[>["
    inside = "".join(f'{mark}<invoke name="{name}">{nested(given)}{mark}</invoke>\n' for name, given in calls)
    return f"{mark}<tool_call>\n{inside}{mark}</tool_call>"


def braced(value: Any, mark: str) -> str:
    if isinstance(value, str):
        return f"{mark}{value}{mark}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braced(inner, mark)}" for key, inner in value.items()) + "}"
    return text_of(value)


def harmony(calls: Calls) -> str:
    head = "<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
    return "".join(f"{head.replace('NAME', name)}{text_of(given)}<|call|>" for name, given in calls)


def numbered(calls: Calls) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text_of(given)}<|tool_call_end|>"
        for number, (name, given) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


GEMMA_MARK = '<|"|>'
PARAM = '<param name="KEY">VALUE</param>'

SPELLINGS: dict[str, Callable[[Calls], str]] = {
    "apertus": lambda calls: f"<|tools_prefix|>[{', '.join(text_of({n: a}) for n, a in calls)}]<|tools_suffix|>",
    "apriel": json_list("<tool_calls>", "</tool_calls>"),
    "cohere": json_list("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"),
    "command_r": json_list("Action:\n```json\n", "```", name="tool_name", arguments="parameters"),
    "deepseek_v3": lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + each(
            lambda name, given: (
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text_of(given)}\n```<｜tool▁call▁end｜>"
            )
        )(calls)
        + "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": lambda calls: f"<｜DSML｜function_calls>\n{each(dsml)(calls)}\n</｜DSML｜function_calls>",
    "function_gemma": each(
        lambda name, given: f"<start_function_call>call:{name}{braced(given, '<escape>')}<end_function_call>", ""
    ),
    "functionary_v31": each(lambda name, given: f"<function={name}>{text_of(given)}</function>", ""),
    "functionary_v32": each(lambda name, given: f">>>{name}\n{text_of(given)}", ""),
    "gemma": lambda calls: f"```tool_code\n[{python(calls)}]\n```",
    "gemma4": each(lambda name, given: f"<|tool_call>call:{name}{braced(given, GEMMA_MARK)}<tool_call|>", ""),
    "gigachat": lambda calls: "".join(f"<|function_call|>{one}" for one in objects(calls)),
    "glm": each(glm),
    "gpt_oss": harmony,
    "granite": json_list("<|tool_call|>"),
    "granite_20b": lambda calls: "\n".join(f"<function_call> {one}" for one in objects(calls)),
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls)),
    "hunyuan_v3": lambda calls: f"<tool_calls:opensource>\n{each(hunyuan)(calls)}\n</tool_calls:opensource>",
    "internlm2": lambda calls: "".join(f"<|action_start|><|plugin|>\n{one}<|action_end|>" for one in objects(calls)),
    "kimi_k2": numbered,
    "kimi_k3": lambda calls: f"<|open|>tools<|sep|>{each(kimi_k3, '')(calls)}<|close|>tools<|sep|>",
    "lfm2": lambda calls: f"<|tool_call_start|>[{python(calls)}]<|tool_call_end|>",
    "llama3": lambda calls: "<|python_tag|>" + "; ".join(objects(calls, arguments="parameters")),
    "llama4": lambda calls: f"<|python_start|>[{python(calls)}]<|python_end|>",
    "longcat": lambda calls: "\n".join(f"<longcat_tool_call>{one}</longcat_tool_call>" for one in objects(calls)),
    "minicpm5": each(lambda name, given: f'<function name="{name}">{pairs(PARAM, given)}</function>'),
    "minimax_m2": lambda calls: f"<minimax:tool_call>\n{each(invoke)(calls)}\n</minimax:tool_call>",
    "minimax_m3": minimax_m3,
    "mistral": json_list("[TOOL_CALLS]"),
    "muse": lambda calls: (
        "<|start|>assistant to=weather<|message|><atem:function_calls>\n"
        + each(lambda name, given: invoke(name, given, "atem:"))(calls)
        + "\n</atem:function_calls><|eot|>"
    ),
    "nemotron": json_list("<TOOLCALL>", "</TOOLCALL>"),
    "olmo3": lambda calls: "<function_calls>\n" + python(calls).replace("), ", ")\n") + "\n</function_calls>",
    "phi4": json_list("functools"),
    "pythonic": lambda calls: f"[{python(calls)}]",
    "qwen3_coder": each(qwen3_coder),
    "seed_oss": each(lambda name, given: qwen3_coder(name, given, "seed:tool_call")),
    "solar": lambda calls: (
        "<|tool_calls|>"
        + each(
            lambda name, given: (
                f"<|tool_call:begin|>id1<|tool_call:name|>{name}<|tool_call:args|>{text_of(given)}<|tool_call:end|>"
            ),
            "",
        )(calls)
        + "<|calls|>"
    ),
    "step3": lambda calls: (
        "<｜tool_calls_begin｜>"
        + each(
            lambda name, given: (
                f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke(name, given, 'steptml:')}<｜tool_call_end｜>"
            )
        )(calls)
        + "<｜tool_calls_end｜>"
    ),
    "tool_calls": json_list("<tool_calls>", "</tool_calls>"),
    "xlam": json_list(""),
}

# Where calls stand alone: nothing else shows that they are calls.
ALONE = ("pythonic", "xlam")
# Where a completion is several messages with headers.
FRAMED = {
    "gpt_oss": "<|channel|>analysis<|message|>THOUGHT<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>TEXT<|end|>",
    "muse": " to=self<|message|>THOUGHT<|eom|><|start|>assistant<|message|>TEXT<|eom|>",
}
# Where keys are words of the call's own syntax, and cannot be any text.
PLAIN_KEYS = ("function_gemma", "gemma4", "minimax_m3")


def spell(style: str, call: str, arguments: dict[str, Any]) -> str:
    return SPELLINGS[style]([(call, arguments)])


def completion(style: str, thought: str, text: str, calls: Calls) -> str:
    """All that a model writes before it waits for what its calls return."""
    if style in FRAMED:
        return FRAMED[style].replace("THOUGHT", thought).replace("TEXT", text) + SPELLINGS[style](calls)
    return f"<think>\n{thought}\n</think>\n\n{'' if style in ALONE else text}\n{SPELLINGS[style](calls)}"
