"""Tool calls, reasoning and chat templates as vLLM, SGLang, llama.cpp and OpenAI have them. One server, to which each
test sends a small template of a family, and a grammar that makes the model write what one of that family would."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import moesaic
from tests.serve.api.running import Running, running
from tests.serve.parser_styles import FRAMED, SPELLINGS

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "now")]
HELLO = [{"role": "user", "content": "Hi"}]
ARGUMENTS = {"city": "Bern", "days": 3}

# Words by which the families' templates are known.
SIGNS = {
    "deepseek_v3": "<｜tool▁calls▁begin｜>",
    "deepseek_v32": "｜DSML｜",
    "gemma4": "<|tool_call> <tool_call|>",
    "glm": "<arg_key>",
    "gpt_oss": "<|channel|> <|message|> analysis",
    "hermes": "<tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "llama3": "<|python_tag|>",
    "llama4": "<|header_start|> tools",
    "minimax_m2": "<minimax:tool_call>",
    "mistral": "[TOOL_CALLS]",
    "pythonic": "func_name1(param",
    "qwen3_coder": "<function= <parameter=",
    "seed_oss": "<seed:tool_call>",
}
SHOWN = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.role }}{% if m.name %}({{ m.name }}){% endif %}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}.{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def template(style: str) -> str:
    return f"{{# {SIGNS[style]} #}}{SHOWN}"


@pytest.fixture(scope="module")
def server(new_engine: Callable[..., moesaic.Engine]) -> Iterator[Running]:
    with running(new_engine(), trust_request_chat_template=True) as found:
        yield found


def body_of(style: str, text: str, **more: Any) -> dict[str, Any]:
    """A request whose answer is that text. It might call a tool instead, as any with tools may: greedily it never does
    by the chance of what was asked before."""
    return {
        "messages": HELLO,
        "temperature": 0,
        "tools": TOOLS,
        "chat_template": template(style),
        "structured_outputs": {"grammar": grammar(text)},
        **more,
    }


def grammar(text: str) -> str:
    """Of that text alone, in which the tags that are tokens of the tiny model's are these tokens."""
    parts = re.split(r"(</?(?:think|tool_call)>)", text)
    return "start: " + " ".join(
        json.dumps(part) if place % 2 == 0 else part for place, part in enumerate(parts) if part
    )


def ask(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def stream(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = server.post("/v1/chat/completions", body | {"stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def refusal(server: Running, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def prompt(server: Running, **body: Any) -> str:
    answer = server.post("/apply-template", {"messages": HELLO, "chat_template": SHOWN, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()["prompt"]


@pytest.mark.parametrize("style", SIGNS)
class TestEveryFamily:
    def test_calls_are_read(self, server: Running, style: str) -> None:
        text = SPELLINGS[style]([("weather", ARGUMENTS)])
        choice = ask(server, body_of(style, text))
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        assert call["type"] == "function"
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == ARGUMENTS

    def test_calls_are_streamed_name_first(self, server: Running, style: str) -> None:
        text = SPELLINGS[style]([("weather", ARGUMENTS), ("now", {})])
        choices = stream(server, body_of(style, text))
        pieces = [piece for choice in choices for piece in choice["delta"].get("tool_calls", ())]
        for number, (name, arguments) in enumerate([("weather", ARGUMENTS), ("now", {})]):
            own = [piece for piece in pieces if piece["index"] == number]
            assert own[0]["function"]["name"] == name
            assert own[0]["id"]
            assert own[0]["type"] == "function"
            assert not any("id" in piece or "name" in piece["function"] for piece in own[1:])
            assert json.loads("".join(piece["function"]["arguments"] for piece in own)) == arguments
        assert choices[-1]["finish_reason"] == "tool_calls"
        assert not any(choice["delta"].get("content") for choice in choices)


class TestCalls:
    def test_content_stands_beside_them(self, server: Running) -> None:
        text = "I look. " + SPELLINGS["mistral"]([("now", {})])
        message = ask(server, body_of("mistral", text))["message"]
        assert message["content"] == "I look."
        assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}

    def test_a_broken_one_is_content(self, server: Running) -> None:
        text = '[TOOL_CALLS]weather[ARGS]{"city": Bern}'
        choice = ask(server, body_of("mistral", text))
        assert choice["message"]["content"] == text
        assert choice["message"]["tool_calls"] is None
        assert choice["finish_reason"] == "stop"

    def test_one_cut_by_max_tokens_says_length(self, server: Running) -> None:
        text = SPELLINGS["mistral"]([("weather", ARGUMENTS)])
        choice = ask(server, body_of("mistral", text, max_tokens=12))
        assert choice["finish_reason"] == "length"
        assert choice["message"]["tool_calls"] is None

    def test_without_tools_there_are_none(self, server: Running) -> None:
        text = SPELLINGS["mistral"]([("now", {})])
        assert ask(server, body_of("mistral", text, tools=None))["message"]["content"] == text

    def test_tool_choice_none_hides_the_tools(self, server: Running) -> None:
        text = SPELLINGS["mistral"]([("now", {})])
        assert ask(server, body_of("mistral", text, tool_choice="none"))["message"]["content"] == text
        assert "weather" not in prompt(server, tools=TOOLS, tool_choice="none")

    def test_parallel_tool_calls_false_keeps_the_first(self, server: Running) -> None:
        text = SPELLINGS["mistral"]([("weather", ARGUMENTS), ("now", {})])
        calls = ask(server, body_of("mistral", text, parallel_tool_calls=False))["message"]["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["weather"]

    def test_every_choice_has_its_own(self, server: Running) -> None:
        answer = server.post("/v1/chat/completions", body_of("mistral", SPELLINGS["mistral"]([("now", {})]), n=2))
        ids = [choice["message"]["tool_calls"][0]["id"] for choice in answer.json()["choices"]]
        assert len(set(ids)) == 2


class TestIds:
    def test_mistral_s_have_nine_characters(self, server: Running) -> None:
        calls = ask(server, body_of("mistral", SPELLINGS["mistral"]([("now", {})])))["message"]["tool_calls"]
        assert len(calls[0]["id"]) == 9
        assert calls[0]["id"].isalnum()

    def test_those_of_another_server_get_nine_too(self, server: Running) -> None:
        call = {"id": "call_of_another_server", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "noon"})
        text = prompt(server, messages=messages, chat_template=template("mistral"))
        made = text.split("assistant: ")[1].split(" ")[0]
        assert len(made) == 9
        assert f"tool: noon[{made}]" in text

    def test_kimi_s_are_what_the_model_wrote(self, server: Running) -> None:
        text = SPELLINGS["kimi_k2"]([("weather", ARGUMENTS), ("now", {})])
        calls = ask(server, body_of("kimi_k2", text))["message"]["tool_calls"]
        assert [call["id"] for call in calls] == ["functions.weather:0", "functions.now:1"]

    def test_those_of_another_server_become_kimi_s(self, server: Running) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
        text = prompt(server, messages=messages, chat_template=template("kimi_k2"))
        assert "functions.now:0 now" in text
        assert "tool: noon[functions.now:0]" in text


class TestReasoning:
    TEXT = "<think>So.</think>Yes."

    def test_is_apart(self, server: Running) -> None:
        message = ask(server, body_of("hermes", self.TEXT))["message"]
        assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")

    def test_is_streamed_apart(self, server: Running) -> None:
        deltas = [choice["delta"] for choice in stream(server, body_of("hermes", self.TEXT))]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "So."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."

    @pytest.mark.parametrize("field", [{"separate_reasoning": False}, {"reasoning_format": "none"}])
    def test_may_stay_in_the_content(self, server: Running, field: dict[str, Any]) -> None:
        message = ask(server, body_of("hermes", self.TEXT, **field))["message"]
        assert (message["reasoning_content"], message["content"]) == (None, self.TEXT)

    def test_may_be_left_out(self, server: Running) -> None:
        message = ask(server, body_of("hermes", self.TEXT, include_reasoning=False))["message"]
        assert (message["reasoning_content"], message["content"]) == (None, "Yes.")

    @pytest.mark.parametrize(
        ("style", "text"),
        [
            ("mistral", "[THINK]So.[/THINK]Yes."),
            ("seed_oss", "<seed:think>So.</seed:think>Yes."),
            ("gemma4", "<|channel>thought\nSo.<channel|>Yes."),
            (
                "gpt_oss",
                FRAMED["gpt_oss"].replace("THOUGHT", "So.").replace("TEXT", "Yes.").replace("commentary", "final"),
            ),
        ],
    )
    def test_by_a_family_s_own_tags(self, server: Running, style: str, text: str) -> None:
        message = ask(server, body_of(style, text))["message"]
        assert (message["reasoning_content"], message["content"]) == ("So.", "Yes.")

    def test_is_asked_for_in_the_template(self, server: Running) -> None:
        shown = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
        assert prompt(server, chat_template=shown, enable_thinking=False) == "False False "
        assert prompt(server, chat_template=shown, reasoning_effort="none") == "False False none"
        assert prompt(server, chat_template=shown, reasoning_effort="high") == "  high"


class TestTools:
    def test_a_template_that_takes_none_says_so(self, server: Running) -> None:
        error = refusal(server, {"messages": HELLO, "tools": TOOLS, "chat_template": "{{ messages[0].content }}"})
        assert error["param"] == "tools"
        assert "takes no tools" in error["message"]
        assert "--chat-template" in error["message"]

    def test_but_a_forced_call_needs_none(self, server: Running) -> None:
        choice = ask(
            server,
            {
                "messages": HELLO,
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "now"}},
                "chat_template": "{{ messages[0].content }}",
                "max_tokens": 200,
            },
        )
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"

    @pytest.mark.parametrize(
        "allowed",
        [
            {"allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}},
            {"mode": "auto", "tools": [{"type": "function", "name": "now"}]},
        ],
    )
    def test_allowed_tools(self, server: Running, allowed: dict[str, Any]) -> None:
        text = prompt(server, tools=TOOLS, tool_choice={"type": "allowed_tools", **allowed})
        assert text.startswith("now user")

    def test_allowed_tools_must_be_tools(self, server: Running) -> None:
        unknown = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "other"}}]}
        choice = {"type": "allowed_tools", "allowed_tools": unknown}
        assert "other" in refusal(server, {"messages": HELLO, "tools": TOOLS, "tool_choice": choice})["message"]

    def test_arguments_as_text_where_a_template_wants_them(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wants = (
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '=' + c.function.arguments }}{% endfor %}"
            "{% endfor %}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        )
        monkeypatch.setitem(server.service.__dict__, "tokenizer", server.service.tokenizer.with_template(wants))
        call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
        answer = server.post("/apply-template", {"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]})
        assert answer.json()["prompt"] == '={"a": 1}'


class TestLegacyFunctions:
    FUNCTIONS = [tool["function"] for tool in TOOLS]

    def body(self, **more: Any) -> dict[str, Any]:
        text = SPELLINGS["hermes"]([("weather", ARGUMENTS)])
        return body_of("hermes", text, tools=None, functions=self.FUNCTIONS, **more)

    def test_a_call_is_a_function_call(self, server: Running) -> None:
        choice = ask(server, self.body())
        assert choice["finish_reason"] == "function_call"
        assert choice["message"]["tool_calls"] is None
        assert choice["message"]["function_call"]["name"] == "weather"
        assert json.loads(choice["message"]["function_call"]["arguments"]) == ARGUMENTS

    def test_streamed(self, server: Running) -> None:
        choices = stream(server, self.body())
        pieces = [choice["delta"]["function_call"] for choice in choices if "function_call" in choice["delta"]]
        assert pieces[0]["name"] == "weather"
        assert json.loads("".join(piece["arguments"] for piece in pieces)) == ARGUMENTS
        assert choices[-1]["finish_reason"] == "function_call"

    def test_function_call_by_name(self, server: Running) -> None:
        body = {"messages": HELLO, "functions": self.FUNCTIONS, "function_call": {"name": "now"}, "max_tokens": 200}
        choice = ask(server, body)
        assert choice["message"]["function_call"]["name"] == "now"

    def test_function_call_none(self, server: Running) -> None:
        assert ask(server, self.body(function_call="none"))["message"]["function_call"] is None

    def test_earlier_calls_and_results(self, server: Running) -> None:
        call = {"name": "now", "arguments": '{"a": 1}'}
        messages = [*HELLO, {"role": "assistant", "content": None, "function_call": call}]
        messages.append({"role": "function", "name": "now", "content": "noon"})
        text = prompt(server, messages=messages)
        assert 'now {"a": 1}' in text
        assert "tool(now): noon" in text


class TestPrefill:
    MESSAGES = [*HELLO, {"role": "assistant", "content": "Well, I"}]

    def test_the_prompt_ends_within_the_last_message(self, server: Running) -> None:
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        assert prompt(server, messages=self.MESSAGES, **fields).endswith("assistant: Well, I")

    def test_a_last_message_of_the_assistant_is_continued(self, server: Running) -> None:
        assert prompt(server, messages=self.MESSAGES).endswith("assistant: Well, I")

    @pytest.mark.parametrize("field", [{"continue_final_message": False}, {"add_generation_prompt": True}])
    def test_unless_the_request_says_otherwise(self, server: Running, field: dict[str, Any]) -> None:
        assert prompt(server, messages=self.MESSAGES, **field).endswith("assistant: Well, I.assistant: ")

    def test_not_both(self, server: Running) -> None:
        fields = {"continue_final_message": True, "add_generation_prompt": True}
        error = refusal(server, {"messages": self.MESSAGES, **fields})
        assert error["param"] == "continue_final_message"

    def test_a_call_is_not_continued(self, server: Running) -> None:
        call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        messages = [*HELLO, {"role": "assistant", "content": "x", "tool_calls": [call]}]
        assert prompt(server, messages=messages).endswith("assistant: ")

    def test_a_template_that_hides_the_message_cannot(self, server: Running) -> None:
        body = {"messages": self.MESSAGES, "chat_template": "{{ messages[0].content }}"}
        assert "cannot be continued" in refusal(server, body)["message"]

    def test_the_answer_is_what_follows(self, server: Running) -> None:
        body = {"messages": self.MESSAGES, "structured_outputs": {"choice": [" see."]}}
        assert ask(server, body)["message"]["content"] == " see."

    def test_echo_puts_it_before(self, server: Running) -> None:
        body = {"messages": self.MESSAGES, "structured_outputs": {"choice": [" see."]}, "echo": True}
        assert ask(server, body)["message"]["content"] == "Well, I see."
        deltas = [choice["delta"] for choice in stream(server, body)]
        assert "".join(delta.get("content", "") for delta in deltas) == "Well, I see."

    def test_within_reasoning(self, server: Running) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "<think>So"}]
        message = ask(server, body_of("hermes", " be it.</think>Yes.", messages=messages))["message"]
        assert (message["reasoning_content"], message["content"]) == (" be it.", "Yes.")


class TestMessages:
    def test_developer_is_system(self, server: Running) -> None:
        assert prompt(server, messages=[{"role": "developer", "content": "S"}, *HELLO]).startswith("system: S")

    def test_content_as_parts(self, server: Running) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        call = {"id": "i", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        messages = [
            {"role": "user", "content": parts},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "i", "content": parts},
        ]
        text = prompt(server, messages=messages)
        assert "user: a\nb." in text
        assert "tool: a\nb[i]" in text

    def test_names_reach_the_template(self, server: Running) -> None:
        assert "user(Ada): Hi" in prompt(server, messages=[{"role": "user", "name": "Ada", "content": "Hi"}])

    def test_reasoning_of_earlier_turns(self, server: Running) -> None:
        shown = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}"
        for field in ("reasoning", "reasoning_content"):
            messages = [{"role": "assistant", "content": "x", field: "So."}]
            text = prompt(server, messages=messages, chat_template=shown, continue_final_message=False)
            assert text == "So.|So."

    def test_documents(self, server: Running) -> None:
        shown = "{% for d in documents %}{{ d.text }}{% endfor %}"
        assert prompt(server, chat_template=shown, documents=[{"text": "Once."}]) == "Once."

    def test_chat_template_kwargs(self, server: Running) -> None:
        assert prompt(server, chat_template="{{ mood }}", chat_template_kwargs={"mood": "calm"}) == "calm"
        error = refusal(server, {"messages": HELLO, "chat_template_kwargs": {"messages": []}})
        assert error["param"] == "chat_template_kwargs.messages"

    def test_a_template_of_a_request_is_sandboxed(self, server: Running) -> None:
        body = {"messages": HELLO, "chat_template": "{{ messages.__class__.__mro__ }}"}
        assert "unsafe" in refusal(server, body, "/apply-template")["message"]
