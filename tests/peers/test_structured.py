"""Structured outputs, as llama.cpp's, vLLM's and SGLang's clients ask for them."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pydantic
import pytest
from jsonschema import Draft202012Validator

from tests.serve.api.running import NAME, Running

QUESTION: list[Any] = [{"role": "user", "content": "Write an example"}]
SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
SQL_TEXT = r"SELECT col_[12]  from table_[12]  where col_[12] = [12] "
LARK = """
start: select_statement
select_statement: "SELECT " column " from " table
column: "col_1 " | "col_2 "
table: "table_1" | "table_2"
"""
# No number of unbounded length: a model that knows nothing would write it to the end of the context.
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 2},
        "work": {
            "type": "object",
            "properties": {"company": {"type": "string", "maxLength": 4}, "years": {"enum": [1, 2, 3]}},
            "required": ["company"],
        },
    },
    "required": ["name", "age", "skills", "work"],
}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
EMAIL = r"[a-c]{1,4}@[a-c]{1,4}\.com"


def chat(server: Running, **fields: Any) -> Any:
    """The message of a chat completion, as plain JSON."""
    answer = server.post("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 300, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def content(server: Running, **fields: Any) -> str:
    choice = chat(server, **fields)
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"])


def refused(server: Running, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": QUESTION}
    answer = server.post(path, {**asked, "max_tokens": 8, **fields})
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    assert found["type"] == "invalid_request_error" and found["message"]
    return found


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len({name for name, _ in pairs}) == len(pairs), pairs
    return dict(pairs)


def closed(schema: Any) -> Any:
    """What a client means by a schema: no other properties."""
    if isinstance(schema, dict):
        schema = {name: closed(value) for name, value in schema.items()}
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
    return schema


def check(text: str, schema: Any) -> Any:
    found = json.loads(text, object_pairs_hook=unique)
    Draft202012Validator(closed(schema)).validate(found)
    return found


# llama.cpp


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_object", "schema": {"items": [{"type": "integer", "maximum": 9, "minimum": 0}]}}, None),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, '"foooooo"'),
        ({"type": "json_schema", "schema": {"const": "beside"}}, '"beside"'),
    ],
)
def test_llamacpp_response_format(server: Running, form: Any, pattern: str | None) -> None:
    if pattern is None:
        text = str(chat(server, response_format=form, seed=3)["message"]["content"])
        assert re.match(r"\[\s*(\d|\])", text), "an array, as its items say"
    else:
        assert re.fullmatch(pattern, content(server, response_format=form))


def test_llamacpp_json_object_is_an_object(server: Running) -> None:
    assert str(chat(server, response_format={"type": "json_object"}, max_tokens=10)["message"]["content"])[0] == "{"


@pytest.mark.parametrize(
    "form",
    [
        {"type": "sound"},
        {"type": "json_object", "schema": 123},
        {"type": "json_object", "schema": {"type": 123}},
        {"type": "json_object", "schema": {"type": "hiccup"}},
    ],
)
def test_llamacpp_response_formats_that_are_none(server: Running, form: Any) -> None:
    assert refused(server, response_format=form)["param"].startswith("response_format")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_llamacpp_json_schema_and_grammar_beside_the_prompt(server: Running, path: str) -> None:
    def said(**fields: Any) -> str:
        asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": QUESTION}
        choice = server.post(path, {**asked, "max_tokens": 40, **fields}).json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    assert said(json_schema={"const": "42"}) == '"42"'
    assert said(grammar='root ::= "a"{5,5}') == "aaaaa"
    assert re.fullmatch(r"\d+(?:[-+]\d+)*", said(grammar="root ::= n ([-+] n){0,3}\nn ::= [0-9]{1,2}"))


def test_llamacpp_an_empty_grammar_is_none(server: Running) -> None:
    assert chat(server, grammar="", max_tokens=4)["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    "grammar",
    ["root ::= this is (not valid GBNF", 'start ::= "a"', 'root ::= "a" undefined', 'root ::= "a', "root ::= [z-a]"],
)
def test_llamacpp_a_grammar_that_is_none(server: Running, grammar: str) -> None:
    assert refused(server, grammar=grammar)["param"] == "grammar"


def test_llamacpp_grammar_and_json_schema_together_are_refused(server: Running) -> None:
    refused(server, grammar='root ::= "a"', json_schema={"const": 1})


def test_llamacpp_a_recursive_grammar(server: Running) -> None:
    grammar = r"""
    root  ::= value
    value ::= "[" ws (value ("," ws value){0,2})? "]" ws | [0-9] ws  # lists of digits
    ws    ::= | " "
    """
    for seed in range(4):
        choice = chat(server, grammar=grammar, seed=seed, max_tokens=120)
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), int | list)


# vLLM


@pytest.mark.parametrize("way", ["guided", "structured_outputs"])
@pytest.mark.parametrize(
    ("kind", "value", "pattern"),
    [
        ("choice", ["Python", "Java", "C++"], r"Python|Java|C\+\+"),
        ("regex", EMAIL, EMAIL),
        ("regex", r"^\d{1,3}(\.\d{1,3}){3}$", r"\d{1,3}(\.\d{1,3}){3}"),
        ("grammar", SQL, SQL_TEXT),
        ("grammar", LARK, "SELECT col_[12]  from table_[12]"),
    ],
)
def test_vllm_forms(server: Running, way: str, kind: str, value: Any, pattern: str) -> None:
    wish = {f"guided_{kind}": value} if way == "guided" else {"structured_outputs": {kind: value}}
    assert re.fullmatch(pattern, content(server, **wish))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("text", [False, True])
def test_vllm_json(server: Running, path: str, text: bool) -> None:
    schema = json.dumps(PERSON) if text else PERSON
    for seed in range(3):
        asked = {"prompt": "A person"} if path == "/v1/completions" else {"messages": QUESTION}
        body = {**asked, "max_tokens": 400, "seed": seed, "structured_outputs": {"json": schema}}
        choice = server.post(path, body).json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        check(choice["text"] if "text" in choice else choice["message"]["content"], PERSON)


def test_vllm_choices_have_logprobs_of_the_models_own(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=QUESTION,
        logprobs=True,
        top_logprobs=5,
        max_tokens=20,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content
    assert all(len(token.top_logprobs) == 5 and token.logprob <= 0 for token in logprobs.content)


@pytest.mark.parametrize(
    ("wish", "place"),
    [
        ({"json": {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}}}, "json"),
        ({"regex": "[.*"}, "regex"),
        ({"grammar": 'root ::= nothing_of_the_kind\nx ::= "a"'}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "not a list"}, "choice"),
        ({"regex": "a", "choice": ["a"]}, "regex"),
        ({"structural_tag": "not json"}, "structural_tag"),
        ({"structural_tag": ""}, "structural_tag"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_vllm_forms_that_are_none(server: Running, path: str, wish: Any, place: str) -> None:
    assert refused(server, path, structured_outputs=wish)["param"].startswith(f"structured_outputs.{place}")


def test_vllm_a_json_schema_must_be_there(server: Running) -> None:
    for form in ({"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}}):
        assert "schema" in refused(server, response_format=form)["message"]


def test_vllm_text_is_free(server: Running) -> None:
    assert chat(server, response_format={"type": "text"}, max_tokens=20)["message"]["content"]


def test_vllm_no_additional_properties(server: Running) -> None:
    schema = {"type": "object", "properties": {name: {"enum": ["x"]} for name in "abc"}, "required": ["a", "b", "c"]}
    for seed in range(5):
        assert json.loads(content(server, guided_json=schema, seed=seed)) == {"a": "x", "b": "x", "c": "x"}


def test_vllm_whitespace(server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}
    compact = {"json": schema, "disable_any_whitespace": True}
    assert content(server, structured_outputs=compact) == '{"a":1,"b":2}'
    text = content(server, guided_json=schema, guided_whitespace_pattern="_{1,2}")
    assert re.fullmatch(r'\{_*"a"_*:_*1_*,_*"b"_*:_*2_*\}', text) and "_" in text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_vllm_a_forced_call_beside_a_response_format(server: Running, choice: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    found = chat(server, tools=[TOOL], tool_choice=choice, response_format=form, parallel_tool_calls=False)
    assert found["finish_reason"] == "tool_calls" and not found["message"]["content"]
    call = found["message"]["tool_calls"][0]["function"]
    assert call["name"] == "get_weather" and set(json.loads(call["arguments"])) == {"city"}


def test_vllm_a_call_or_an_answer_of_the_form(server: Running) -> None:
    """The model may choose, here by what is likely: a call begins with a tag, an answer with a brace."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["red", "blue"]}}}
    fast = server.engine.tokenizer.fast  # type: ignore[union-attr]
    tag = str(fast.token_to_id("<tool_call>"))
    asked = {"tools": [TOOL], "tool_choice": "auto", "response_format": form, "parallel_tool_calls": False}
    called = chat(server, **asked, logit_bias={tag: 100})
    assert called["finish_reason"] == "tool_calls"
    assert json.loads(called["message"]["tool_calls"][0]["function"]["arguments"])["city"] in ("Paris", "Rome")
    answered = chat(server, **asked, logit_bias={tag: -100})
    assert answered["finish_reason"] == "stop" and json.loads(answered["message"]["content"]) in ("red", "blue")
    none = chat(server, **asked | {"tool_choice": "none"}, logit_bias={tag: 100})
    assert json.loads(none["message"]["content"]) in ("red", "blue")


def test_vllm_strict_tools_bind_the_call_and_not_the_text(server: Running) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    fast = server.engine.tokenizer.fast  # type: ignore[union-attr]
    tag = str(fast.token_to_id("<tool_call>"))
    called = chat(server, tools=[strict], logit_bias={tag: 100}, stop="</tool_call>", max_tokens=80)
    calls = called["message"]["tool_calls"]
    assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Paris", "Rome")
    free = chat(server, tools=[strict], logit_bias={tag: -100}, max_tokens=12)
    assert free["message"]["content"] and not free["message"].get("tool_calls")


class Car(pydantic.BaseModel):
    brand: str = pydantic.Field(max_length=6)
    kind: str = pydantic.Field(pattern="^(sedan|suv)$")


def test_vllm_responses_parse(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=NAME, input="A car", text_format=Car, max_output_tokens=200)
    assert answer.output_parsed is not None and answer.output_parsed.kind in ("sedan", "suv")


def test_vllm_responses_take_structured_outputs(server: Running) -> None:
    body = {"input": "x", "max_output_tokens": 30, "structured_outputs": {"choice": ["left", "right"]}}
    answer = server.post("/v1/responses", body).json()
    assert answer["output"][-1]["content"][0]["text"] in ("left", "right")
    body["text"] = {"format": {"type": "json_object"}}
    assert server.post("/v1/responses", body).status_code == 400, "one form at a time"


# SGLang


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "user@example.com"', r"user@example\.com"),
        ('root ::= "Hello" | "Hi" | "Hey"', "Hello|Hi|Hey"),
        ("root ::= digit digit digit\ndigit ::= [0-9]", r"\d{3}"),
        ('root ::= "(" d d d ") " d d d "-" d d d d\nd ::= [0-9]', r"\(\d{3}\) \d{3}-\d{4}"),
        ('root ::= "#" hex hex\nhex ::= [0-9a-fA-F]{3}', "#[0-9a-fA-F]{6}"),
        ('root ::= "{" "\\"name\\"" ":" ("\\"A\\"" | "\\"B\\"") "}"', r'\{"name":"[AB]"\}'),
        ('root ::= item ("," item){0,2}\nitem ::= [a-c]+ | "x"', r"([a-c]+|x)(,([a-c]+|x)){0,2}"),
    ],
)
def test_sglang_ebnf(server: Running, grammar: str, pattern: str) -> None:
    choice = chat(server, ebnf=grammar, max_tokens=60, seed=1)
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"])
    else:
        assert "+" in pattern


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_sglang_regex(server: Running, path: str) -> None:
    asked = {"prompt": "x"} if path == "/v1/completions" else {"messages": QUESTION}
    choice = server.post(path, {**asked, "regex": EMAIL, "max_tokens": 60}).json()["choices"][0]
    assert re.fullmatch(EMAIL, choice["text"] if "text" in choice else choice["message"]["content"])


def test_sglang_json_schema_as_a_text(server: Running) -> None:
    answer = server.post("/v1/completions", {"prompt": "x", "max_tokens": 400, "json_schema": json.dumps(PERSON)})
    check(answer.json()["choices"][0]["text"], PERSON)


def test_sglang_one_form_at_a_time(server: Running) -> None:
    refused(server, regex="a", ebnf='root ::= "a"')
    refused(server, regex="a", response_format={"type": "json_object"})


FUNCTION = {"begin": "<function=get_weather>", "schema": TOOL["function"]["parameters"], "end": "</function>"}


def test_sglang_structural_tag_of_the_older_kind(server: Running) -> None:
    """Free text; and where the trigger comes in it, a tag."""
    form = {"type": "structural_tag", "structures": [FUNCTION], "triggers": ["<function="]}
    text = str(chat(server, response_format=form, max_tokens=20, seed=1)["message"]["content"])
    assert text and not re.search("<function=(?!g|$)", text)
    newer = {"triggers": ["<function="], "tags": [], "at_least_one": True, "stop_after_first": True}
    newer["tags"] = [{**FUNCTION, "content": {"type": "json_schema", "json_schema": FUNCTION["schema"]}}]
    found = content(server, structural_tag={"format": {"type": "triggered_tags", **newer}})
    assert re.fullmatch(r'<function=get_weather>\{\s*"city"\s*:\s*"(Paris|Rome)"\s*\}</function>', found)


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"type": "const_string", "value": "Let's think."}, r"Let's think\."),
        ({"type": "regex", "pattern": "[a-c]{2}/[0-9]"}, "[a-c]{2}/[0-9]"),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "[12]"),
        (
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "A: "}, {"type": "regex", "pattern": "b"}],
            },
            "A: b",
        ),
        ({"type": "or", "elements": [{"type": "const_string", "value": v} for v in ("yes", "no")]}, "yes|no"),
        ({"type": "repeat", "min": 2, "max": 3, "content": {"type": "const_string", "value": "ab"}}, "(ab){2,3}"),
        (
            {"type": "tag", "begin": "<r>", "content": {"type": "regex", "pattern": "[xy]"}, "end": ["</r>", "</a>"]},
            None,
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [{"begin": "<i>", "content": {"type": "regex", "pattern": "[xy]"}, "end": "</i>"}],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": True,
            },
            "<i>[xy]</i>",
        ),
    ],
)
def test_structural_tags_of_the_newer_kind(server: Running, given: Any, pattern: str | None) -> None:
    for place in ("response_format", "structured_outputs"):
        tag = {"type": "structural_tag", "format": given}
        wish = {place: tag} if place == "response_format" else {place: {"structural_tag": json.dumps(tag)}}
        assert re.fullmatch(pattern or "<r>[xy]</[ra]>", content(server, **wish))


@pytest.mark.parametrize(
    "form",
    [{}, {"format": {}}, {"format": {"type": "any_tokens"}}, {"structures": [], "triggers": []}, {"triggers": ["<"]}],
)
def test_structural_tags_that_are_none(server: Running, form: Any) -> None:
    refused(server, response_format={"type": "structural_tag", **form})


# What all of them promise


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$ref": "#/$defs/P",
            "$defs": {"P": {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}},
        },
        {"type": "object", "properties": {"o": {"properties": {"i": {"enum": [1]}}}}, "required": ["o"]},
        {"type": "array", "items": {"properties": {"i": {"enum": [1]}}}, "minItems": 1, "maxItems": 2},
        {"anyOf": [{"properties": {"a": {"enum": [1]}}, "required": ["a"]}, {"type": "null"}]},
    ],
)
@pytest.mark.parametrize("strict", [None, True, False])
def test_keys_are_never_invented(server: Running, schema: Any, strict: bool | None) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    for seed in range(2):
        check(content(server, response_format=form, seed=seed), schema)


def test_parts_of_one_object_know_each_other(server: Running) -> None:
    schema = {"allOf": [{"properties": {name: {"enum": [1]}}, "required": [name]} for name in ("a", "b")]}
    assert json.loads(content(server, json_schema=schema)) == {"a": 1, "b": 1}


def test_keys_that_a_schema_allows_come_once(server: Running) -> None:
    schema = {"type": "object", "additionalProperties": {"enum": [1]}, "propertyNames": {"pattern": "^[ab]$"}}
    for seed in range(6):
        found = json.loads(content(server, json_schema=schema, seed=seed, max_tokens=400), object_pairs_hook=unique)
        assert set(found) <= {"a", "b"}


def test_the_same_text_streamed_and_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": NAME, "messages": QUESTION, "seed": 5, "max_tokens": 300}
    asked["extra_body"] = {"guided_json": PERSON}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


@pytest.mark.parametrize(
    "wish",
    [
        {"grammar": "root ::= r0\n" + "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(60)) + '\nr60 ::= "a"'},
        {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000},
        {"json_schema": {"$ref": "#"}},
        {"json_schema": {"allOf": [{"$ref": "#"}]}},
        {"json_schema": {"type": "object", "properties": {f"k{n}": {} for n in range(3000)}}},
        {"regex": "(?=a)a"},
        {"json_schema": {"type": "string", "pattern": "(?!a)b"}},
    ],
)
def test_forms_too_large_to_follow_are_refused_and_nobody_else_notices(server: Running, wish: Any) -> None:
    refused(server, **wish)
    assert content(server, guided_choice=["fine"]) == "fine"
