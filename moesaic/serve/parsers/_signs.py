"""By which words in its chat template a style of tool calls is known. The first line that fits counts, so what is more
particular stands further up."""

from __future__ import annotations

SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # name, words of which all are in the template
    ("gpt_oss", ("<|channel|>", "<|message|>", "analysis")),
    ("muse", ("<atem:",)),
    ("kimi_k3", ("<|open|>", "<|sep|>", "<|close|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m3", ("]<]minimax[>[",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("hunyuan_v3", ("tool_sep", "arg_key")),
    ("cohere", ("<|START_ACTION|>",)),
    ("command_r", ("Action:", "directly-answer")),
    ("apertus", ("<|tools_prefix|>",)),
    ("gemma4", ("<|tool_call>", "<tool_call|>")),
    ("function_gemma", ("<start_function_call>",)),
    ("gigachat", ("<|role_sep|>", "<|message_sep|>")),
    ("solar", ("<|tool_call:begin|>",)),
    ("internlm2", ("<|action_start|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("lfm2", ("List of tools: [",)),
    ("step3", ("steptml:",)),
    ("longcat", ("<longcat_tool_call>",)),
    ("functionary_v32", (">>>all",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("qwen3_coder", ("<function=", "<tool_call>")),
    ("functionary_v31", ("<function=",)),
    ("minicpm5", ('<function name="',)),
    ("olmo3", ("<function_calls>",)),
    ("nemotron", ("<TOOLCALL>",)),
    ("apriel", ("[BEGIN FINAL RESPONSE]",)),
    ("granite_20b", ("<function_call>",)),
    ("phi4", ("functools[",)),
    ("phi4", ("<|tool|>",)),
    ("granite", ("<|tool_call|>",)),
    ("granite", ("<|start_of_role|>available_tools",)),
    ("tool_calls", ("<tool_calls>",)),
    ("glm", ("<arg_key>",)),
    ("hermes", ("<tool_call>",)),
    ("gemma", ("<start_of_turn>", "tool")),
    ("xlam", ("single JSON array",)),
    ("llama4", ("<|header_start|>", "tools")),
    ("pythonic", ("func_name1(param",)),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ('{"name": function name, "parameters": dictionary of argument name and its value}',)),
    ("llama3", ("<|start_header_id|>", "tools")),
)


def named_by(template: str) -> str:
    """The parser that a template's words name; `plain` if none do."""
    return next((name for name, words in SIGNS if all(word in template for word in words)), "plain")
