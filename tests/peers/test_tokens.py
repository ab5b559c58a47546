"""Tokens in and out, as the suites of vLLM's, SGLang's and llama.cpp's servers check them, and as transformers, which
nobody here wrote, computes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

import moesaic
from tests.serve.api.running import Running, running

TEXT = "The number 7 is a number; yes or no, grüße 😀"
CHAT = [
    {"role": "user", "content": "Is 7 a number?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "And 😀?"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "Counts.",
            "parameters": {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]},
        },
    }
]
# In the way of Hermes, whose calls are a kind the server knows.
TEMPLATE = """{%- if tools %}<|system|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for message in messages %}<|{{ message.role }}|>
{{ message.content }}{{ extra | default("") }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def log_of(directory: Path) -> Any:
    """Log-probabilities after every token, by transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def found(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)

    return found


@pytest.fixture(scope="module")
def with_tools(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Any]]:
    """A server whose template takes tools, and transformers' tokenizer of the same files."""
    import transformers

    copy = tmp_path_factory.mktemp("tools") / "tiny"
    shutil.copytree(directory, copy)
    (copy / "chat_template.jinja").write_text(TEMPLATE)
    engine = moesaic.Engine(moesaic.load(copy, threads=1), cache_bytes=4 << 20, seed=0)
    with running(engine, trust_request_chat_template=True) as server:
        yield server, transformers.AutoTokenizer.from_pretrained(copy)


def post(server: Running, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert "x-moesaic-ignored" not in answer.headers
    found: dict[str, Any] = answer.json()
    return found


def complete(server: Running, **body: Any) -> dict[str, Any]:
    given = {"prompt": TEXT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | body
    found: dict[str, Any] = post(server, "/v1/completions", **given)
    return found


def chat(server: Running, **body: Any) -> dict[str, Any]:
    given = {"messages": CHAT, "max_tokens": 6, "temperature": 0.0, "ignore_eos": True} | body
    return post(server, "/v1/chat/completions", **given)


def refused(server: Running, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def streamed(server: Running, path: str, **body: Any) -> list[dict[str, Any]]:
    with server.http() as client, client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# /tokenize, /detokenize, /tokenizer_info: vLLM


@pytest.mark.parametrize("special", [True, False, None])
def test_a_text_has_the_tokens_of_transformers(server: Running, theirs: Any, special: bool | None) -> None:
    body: dict[str, Any] = {"prompt": TEXT} | ({} if special is None else {"add_special_tokens": special})
    found = post(server, "/tokenize", **body)
    assert found["tokens"] == theirs.encode(TEXT, add_special_tokens=special is not False)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512 and found["token_strs"] is None


@pytest.mark.parametrize("reply", [True, False])
@pytest.mark.parametrize("special", [True, False])
def test_a_conversation_has_the_tokens_of_transformers(
    server: Running, theirs: Any, reply: bool, special: bool
) -> None:
    found = post(server, "/tokenize", messages=CHAT, add_generation_prompt=reply, add_special_tokens=special)
    text = theirs.apply_chat_template(CHAT, add_generation_prompt=reply, tokenize=False)
    assert found["tokens"] == theirs.encode(text, add_special_tokens=special)


@pytest.mark.parametrize("reply", [True, False])
def test_tools_and_template_variables_are_rendered(with_tools: tuple[Running, Any], reply: bool) -> None:
    server, theirs = with_tools
    found = post(
        server,
        "/tokenize",
        messages=CHAT,
        tools=TOOLS,
        add_generation_prompt=reply,
        chat_template_kwargs={"extra": "!"},
    )
    text = theirs.apply_chat_template(CHAT, tools=TOOLS, add_generation_prompt=reply, extra="!", tokenize=False)
    assert "count" in text and "!<|end|>" in text
    assert found["tokens"] == theirs.encode(text, add_special_tokens=False)


def test_the_last_message_is_continued(with_tools: tuple[Running, Any]) -> None:
    server, theirs = with_tools
    messages = [*CHAT, {"role": "assistant", "content": "Sure,"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    found = post(server, "/tokenize", **body)
    text = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert text.endswith("Sure,")
    assert found["tokens"] == theirs.encode(text, add_special_tokens=False)
    error = refused(server, "/tokenize", **body | {"add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


def test_another_template_where_the_server_takes_one(with_tools: tuple[Running, Any], server: Running) -> None:
    trusting, theirs = with_tools
    other = "{% for message in messages %}{{ message.content }};{% endfor %}"
    found = post(trusting, "/tokenize", messages=CHAT, chat_template=other)
    assert found["tokens"] == theirs.encode("Is 7 a number?;yes;And 😀?;", add_special_tokens=False)
    assert refused(server, "/tokenize", messages=CHAT, chat_template=other)["param"] == "chat_template"


def test_token_strings_are_those_of_the_vocabulary(server: Running, theirs: Any) -> None:
    found = post(server, "/tokenize", prompt=TEXT, return_token_strs=True)
    assert found["token_strs"] == theirs.convert_ids_to_tokens(found["tokens"])


def test_detokenize(server: Running, theirs: Any) -> None:
    tokens = theirs.encode(TEXT, add_special_tokens=False)
    assert post(server, "/detokenize", tokens=tokens)["prompt"] == TEXT
    end = theirs.eos_token_id
    assert post(server, "/detokenize", tokens=[*tokens, end])["prompt"] == TEXT + theirs.eos_token
    assert post(server, "/detokenize", tokens=[*tokens, end], skip_special_tokens=True)["prompt"] == TEXT
    assert refused(server, "/detokenize", tokens=[400])["param"] == "tokens"


def test_tokenizer_info(server: Running, directory: Path) -> None:
    with server.http() as client:
        found = client.get("/tokenizer_info").json()
    assert isinstance(found["tokenizer_class"], str) and found["tokenizer_class"]
    assert found["chat_template"] == server.service.tokenizer.chat_template
    assert found["eos_token"] == server.service.tokenizer.special("eos_token")
    assert found["model_max_length"] >= post(server, "/tokenize", prompt="x")["max_model_len"]
    assert str(directory) not in json.dumps(found)


def test_a_text_or_a_conversation(server: Running) -> None:
    for body in ({}, {"prompt": "x", "messages": CHAT}, {"prompt": "x", "content": "x"}):
        assert refused(server, "/tokenize", **body)["param"] == "prompt"
    assert refused(server, "/tokenize", 404, prompt="x", model="other")["code"] == "model_not_found"


# llama.cpp's and SGLang's forms of the same


def test_llama_cpp_tokenize_and_back(server: Running, theirs: Any) -> None:
    found = post(server, "/tokenize", content=TEXT)
    assert found["tokens"] == theirs.encode(TEXT, add_special_tokens=False)
    assert post(server, "/detokenize", tokens=found["tokens"])["content"] == TEXT
    special = post(server, "/tokenize", content=TEXT, add_special=True)["tokens"]
    assert special == theirs.encode(TEXT, add_special_tokens=True)


def test_llama_cpp_tokenize_with_pieces(server: Running) -> None:
    found = post(server, "/tokenize", content="grüße 媽 🤗", with_pieces=True)["tokens"]
    raw = b"".join(bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode() for one in found)
    assert raw.decode() == "grüße 媽 🤗"
    assert any(isinstance(one["piece"], list) for one in found)  # parts of a character are bytes
    assert [one["id"] for one in found] == post(server, "/tokenize", content="grüße 媽 🤗")["tokens"]


def test_sglang_tokenizes_several_texts(server: Running, theirs: Any) -> None:
    found = post(server, "/v1/tokenize", prompt=[TEXT, "yes"])
    assert found["tokens"] == [theirs.encode(TEXT), theirs.encode("yes")]
    assert found["count"] == [len(one) for one in found["tokens"]]
    assert post(server, "/v1/detokenize", tokens=found["tokens"][1])["prompt"] == "yes"


# return_token_ids: vLLM


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_completion_has_token_ids_if_asked(server: Running, theirs: Any, asked: bool | None) -> None:
    (choice,) = complete(server, **({} if asked is None else {"return_token_ids": asked}))["choices"]
    if not asked:
        assert choice["token_ids"] is None and choice["prompt_token_ids"] is None
        return
    assert choice["prompt_token_ids"] == theirs.encode(TEXT)
    assert len(choice["token_ids"]) == 6
    whole = theirs.decode(choice["prompt_token_ids"] + choice["token_ids"], skip_special_tokens=True)
    assert whole == TEXT + choice["text"]


def test_ids_show_the_token_that_ended_the_text(server: Running, theirs: Any) -> None:
    end = theirs.eos_token_id
    body = {"ignore_eos": False, "logit_bias": {str(end): 100}, "return_token_ids": True}
    (choice,) = complete(server, **body)["choices"]
    assert choice["finish_reason"] == "stop" and choice["text"] == "" and choice["token_ids"] == [end]
    (choice,) = chat(server, **body)["choices"]
    assert choice["message"]["content"] == "" and choice["token_ids"] == [end]


def test_every_choice_has_its_own_ids(server: Running) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "temperature": 1.0, "seed": 3, "return_token_ids": True}
    choices = complete(server, **body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7], [5, 6, 7], [8, 9], [8, 9]]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 4


def test_a_chats_prompt_ids_are_those_of_tokenize(with_tools: tuple[Running, Any]) -> None:
    server, _ = with_tools
    for more in (
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "count"}}},
        {"chat_template_kwargs": {"extra": "?"}},
        {"messages": [*CHAT, {"role": "assistant", "content": "Sure,"}]},
        {"truncate_prompt_tokens": 9},
        {"add_special_tokens": True},
    ):
        body: dict[str, Any] = {"messages": CHAT, "max_tokens": 2, "return_token_ids": True} | more
        answer = chat(server, **body)
        assert answer["prompt_token_ids"] == post(server, "/tokenize", **body)["tokens"], more
        assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]
        assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_a_streamed_completion_brings_ids_piece_by_piece(server: Running) -> None:
    body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    whole = complete(server, **body)["choices"][0]
    chunks = [chunk["choices"][0] for chunk in streamed(server, "/v1/completions", **body | {"logprobs": 1})]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk["token_ids"]] == whole["token_ids"]
    for chunk in chunks:
        assert len(chunk["token_ids"]) == len(chunk["logprobs"]["tokens"])


@pytest.mark.parametrize("stop", [None, "zzz"])  # a stop string holds text back, and its tokens come later
def test_a_streamed_chat_brings_ids_piece_by_piece(server: Running, stop: str | None) -> None:
    body: dict[str, Any] = {"messages": CHAT, "max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "stop": stop}
    body["return_token_ids"] = True
    whole = post(server, "/v1/chat/completions", **body)
    chunks = streamed(server, "/v1/chat/completions", **body)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]


def test_the_openai_client_reads_them(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True, "ignore_eos": True}
    made = client.completions.create(model="tiny", prompt=TEXT, max_tokens=3, extra_body=extra)
    assert len(made.choices[0].token_ids) == 3  # type: ignore[attr-defined]
    said = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=3, extra_body=extra)  # type: ignore[arg-type]
    assert len(said.choices[0].token_ids) == 3 and said.prompt_token_ids  # type: ignore[attr-defined]
    stream = client.chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=3, stream=True, logprobs=True, top_logprobs=2, extra_body=extra
    )  # type: ignore[call-overload]
    chunks = list(stream)
    assert chunks[0].prompt_token_ids == said.prompt_token_ids  # type: ignore[attr-defined]
    entries = [
        one for chunk in chunks for choice in chunk.choices if choice.logprobs for one in choice.logprobs.content
    ]
    assert len(entries) == 3 and all(len(one.top_logprobs) == 2 for one in entries)


# Tokens in


def test_ids_in_are_ids_out(server: Running, theirs: Any) -> None:
    """A sequence that its own text would not be tokenized to comes through as it is."""
    odd = [theirs.encode(letter, add_special_tokens=False)[0] for letter in "number"]
    assert odd != theirs.encode("number", add_special_tokens=False)
    for body in ({"prompt": odd}, {"prompt_token_ids": odd}, {"prompt": "", "prompt_token_ids": odd}):
        (choice,) = post(server, "/v1/completions", **body, max_tokens=2, return_token_ids=True)["choices"]
        assert choice["prompt_token_ids"] == odd
    answer = chat(server, prompt_token_ids=odd, return_token_ids=True)
    assert answer["prompt_token_ids"] == odd
    assert post(server, "/v1/completions", prompt=odd, max_tokens=6, temperature=0.0, ignore_eos=True,
                return_token_ids=True)["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]  # fmt: skip
    for path, place in (("/v1/completions", "prompt"), ("/v1/chat/completions", "prompt_token_ids")):
        assert refused(server, path, messages=CHAT, prompt_token_ids=[400], max_tokens=1)["param"] == place


def test_a_loop_of_tokens_never_leaves_them(server: Running, log_of: Any) -> None:
    """Two turns: what came out goes in again, and its log-probabilities are those of the first time."""
    first = complete(server, prompt_token_ids=[5, 6, 7], return_token_ids=True, logprobs=0)["choices"][0]
    said = first["prompt_token_ids"] + first["token_ids"]
    second = complete(server, prompt_token_ids=[*said, 9], max_tokens=0, echo=True, logprobs=0, return_token_ids=True)[
        "choices"
    ][0]
    assert second["prompt_token_ids"] == [*said, 9] and second["token_ids"] == []
    assert second["logprobs"]["token_logprobs"][3:9] == pytest.approx(first["logprobs"]["token_logprobs"], abs=1e-5)
    log_TV = log_of([*said, 9])
    expected = [float(log_TV[place, token]) for place, token in enumerate([*said, 9][1:])]
    assert second["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-4)


def test_the_loop_of_the_document_runs(server: Running) -> None:
    text = (Path(__file__).parents[2] / "docs/api/tokens.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url), names)
    tokens, logprobs, learn, again = (names[name] for name in ("tokens", "logprobs", "learn", "again"))
    assert len(tokens) == len(logprobs) == len(learn) == len(again) and sum(learn) > 2
    written = [(told, later) for told, later, own in zip(logprobs, again, learn, strict=True) if own]
    assert [told for told, _ in written] == pytest.approx([later for _, later in written], abs=1e-5)


# truncate_prompt_tokens: vLLM


def test_truncation_keeps_the_end_or_the_beginning(server: Running) -> None:
    tokens = list(range(5, 45))
    for side, kept in (({}, tokens[-10:]), ({"truncation_side": "left"}, tokens[-10:]),
                       ({"truncation_side": "right"}, tokens[:10])):  # fmt: skip
        found = complete(server, prompt=tokens, truncate_prompt_tokens=10, return_token_ids=True, **side)
        assert found["choices"][0]["prompt_token_ids"] == kept
        assert found["usage"]["prompt_tokens"] == 10
    text = complete(server, truncate_prompt_tokens=4, return_token_ids=True, echo=True, max_tokens=1)["choices"][0]
    assert text["prompt_token_ids"] == post(server, "/tokenize", prompt=TEXT)["tokens"][-4:]
    assert text["text"].startswith(post(server, "/detokenize", tokens=text["prompt_token_ids"])["prompt"])


def test_minus_one_keeps_what_fits(server: Running) -> None:
    tokens = [5 + place % 300 for place in range(700)]
    found = complete(server, prompt=tokens, truncate_prompt_tokens=-1, max_tokens=12, return_token_ids=True)
    choice = found["choices"][0]
    assert choice["prompt_token_ids"] == tokens[-500:] and len(choice["token_ids"]) == 12
    assert complete(server, prompt=[5, 6], truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 2
    long = [{"role": "user", "content": "number " * 2000}]
    assert chat(server, messages=long, truncate_prompt_tokens=-1, max_tokens=12)["usage"]["prompt_tokens"] == 500
    assert refused(server, "/v1/chat/completions", messages=long)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kept", [0, 511, -2, 2**31])
def test_truncation_to_what_no_prompt_can_have_is_refused(server: Running, kept: int) -> None:
    body = {"prompt": TEXT, "max_tokens": 12, "truncate_prompt_tokens": kept}
    assert refused(server, "/v1/completions", **body)["param"] == "truncate_prompt_tokens"


# logprobs


def test_tokens_as_ids_in_a_completion(server: Running) -> None:
    body = {"echo": True, "logprobs": 1, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(server, **body)["choices"][0]
    ids = [int(token.removeprefix("token_id:")) for token in choice["logprobs"]["tokens"]]
    assert ids == choice["prompt_token_ids"] + choice["token_ids"]
    for token, top in zip(choice["logprobs"]["tokens"][1:], choice["logprobs"]["top_logprobs"][1:], strict=True):
        assert next(iter(top)) == token  # the chosen one first, as vLLM has it
        assert all(name.startswith("token_id:") for name in top)


def test_tokens_as_ids_in_a_chat(server: Running) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = chat(server, **body)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [int(one["token"].removeprefix("token_id:")) for one in entries] == choice["token_ids"]
    assert all(top["token"].startswith("token_id:") for one in entries for top in one["top_logprobs"])
    raw = b"".join(bytes(one["bytes"]) for one in entries)
    assert raw.decode(errors="replace").startswith(choice["message"]["content"].rstrip("\ufffd"))


@pytest.mark.parametrize(
    ("given", "top", "sampled"), [([50], 5, 42), ([10, 100, 50], 3, 42), ([10, 100, 50], None, 50)]
)
def test_log_probabilities_of_given_tokens(
    server: Running, log_of: Any, given: list[int], top: int | None, sampled: int
) -> None:
    body = {"logprobs": True, "logprob_token_ids": given, "allowed_token_ids": [sampled], "max_tokens": 1}
    body |= {"return_tokens_as_token_ids": True, "return_token_ids": True} | (
        {} if top is None else {"top_logprobs": top}
    )
    answer = chat(server, **body)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["token"] == f"token_id:{sampled}"
    found = {int(one["token"].removeprefix("token_id:")): one["logprob"] for one in entry["top_logprobs"]}
    assert set(found) == {*given, sampled} and len(entry["top_logprobs"]) == len(found)
    log_V = log_of(answer["prompt_token_ids"])[-1]
    assert found == pytest.approx({token: float(log_V[token]) for token in found}, abs=1e-4)
    chunks = streamed(server, "/v1/chat/completions", messages=CHAT, temperature=0.0, **body)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert pieces[0]["content"] == [entry]


def test_given_tokens_in_a_completion(server: Running, log_of: Any) -> None:
    body = {"logprobs": 5, "logprob_token_ids": [50, 60], "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(server, **body)["choices"][0]
    log_TV = log_of(choice["prompt_token_ids"] + choice["token_ids"])
    for place, (token, top) in enumerate(zip(choice["token_ids"], choice["logprobs"]["top_logprobs"], strict=True)):
        row = log_TV[len(choice["prompt_token_ids"]) - 1 + place]
        assert top == pytest.approx({f"token_id:{one}": float(row[one]) for one in {token, 50, 60}}, abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x", "logprob_token_ids": [5]}),
        ("/v1/chat/completions", {"messages": CHAT, "logprob_token_ids": [5]}),
        ("/v1/completions", {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 1, "logprob_token_ids": [5]}),
        ("/v1/completions", {"prompt": "x", "use_beam_search": True, "n": 2, "logprobs": 1, "logprob_token_ids": [5]}),
        ("/v1/completions", {"prompt": "x", "logprobs": 1, "logprob_token_ids": [400]}),
    ],
)
def test_given_tokens_that_cannot_be_reported_are_refused(server: Running, path: str, body: dict[str, Any]) -> None:
    assert refused(server, path, **body)["param"] == "logprob_token_ids"


@pytest.mark.parametrize("top", [0, 1, 3])
def test_prompt_logprobs_and_ranks_are_those_of_transformers(server: Running, log_of: Any, top: int) -> None:
    found = complete(server, prompt_logprobs=top, max_tokens=1, return_token_ids=True)["choices"][0]
    prompt, entries = found["prompt_token_ids"], found["prompt_logprobs"]
    log_TV = log_of(prompt)
    order_TV = log_TV.argsort(-1, descending=True)
    assert entries[0] is None and len(entries) == len(prompt)
    far = 0
    for place, (token, entry) in enumerate(zip(prompt[1:], entries[1:], strict=True)):
        expected = {*order_TV[place, :top].tolist(), token}
        assert {int(one) for one in entry} == expected
        for one, told in entry.items():
            assert told["rank"] == int((order_TV[place] == int(one)).nonzero()) + 1
            assert told["logprob"] == pytest.approx(float(log_TV[place, int(one)]), abs=1e-4)
            far += told["rank"] > top
    assert far  # some tokens of the prompt were not among the likeliest, and have their ranks all the same


def test_a_chats_prompt_logprobs(server: Running) -> None:
    answer = chat(server, prompt_logprobs=1, return_token_ids=True)
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    for token, entry in zip(answer["prompt_token_ids"][1:], answer["prompt_logprobs"][1:], strict=True):
        assert entry[str(token)]["decoded_token"] is not None


def test_echo_and_prompt_logprobs_agree(server: Running) -> None:
    choice = complete(server, echo=True, logprobs=2, prompt_logprobs=2, return_token_ids=True)["choices"][0]
    count = len(choice["prompt_token_ids"])
    for token, entry, told in zip(
        choice["prompt_token_ids"][1:],
        choice["prompt_logprobs"][1:],
        choice["logprobs"]["token_logprobs"][1:count],
        strict=True,
    ):
        assert entry[str(token)]["logprob"] == told
    assert len(choice["logprobs"]["tokens"]) == count + len(choice["token_ids"])


def test_minus_one_is_the_whole_vocabulary_within_a_limit(server: Running) -> None:
    choice = complete(
        server, logprobs=-1, prompt_logprobs=-1, max_tokens=2, prompt=[5, 6], return_tokens_as_token_ids=True
    )["choices"][0]
    assert all(len(top) == 400 for top in choice["logprobs"]["top_logprobs"])
    assert len(choice["prompt_logprobs"][1]) == 400
    assert sorted(one["rank"] for one in choice["prompt_logprobs"][1].values()) == list(range(1, 401))
    entry = chat(server, logprobs=True, top_logprobs=-1, max_tokens=1)["choices"][0]["logprobs"]["content"][0]
    assert len(entry["top_logprobs"]) == 400
    for path, body, place in (
        ("/v1/completions", {"prompt": [5], "logprobs": -1, "max_tokens": None}, "logprobs"),
        ("/v1/completions", {"prompt": [5], "logprobs": -1, "max_tokens": 3000}, "logprobs"),
        ("/v1/chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ("/v1/completions", {"prompt": [5], "logprobs": 101}, "logprobs"),
        ("/v1/completions", {"prompt": [5], "prompt_logprobs": -2}, "prompt_logprobs"),
    ):
        assert refused(server, path, **body)["param"] == place


def test_prompt_logprobs_are_not_streamed(server: Running) -> None:
    body = {"prompt": [5, 6], "prompt_logprobs": 1, "stream": True}
    assert refused(server, "/v1/completions", **body)["param"] == "prompt_logprobs"


def test_a_large_response_is_the_same_json(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many log-probabilities are written on a thread, piece by piece."""
    body = {
        "prompt": list(range(5, 65)),
        "echo": True,
        "logprobs": 20,
        "prompt_logprobs": 20,
        "max_tokens": 3,
        "seed": 1,
    }
    large = complete(server, **body)
    monkeypatch.setattr("moesaic.serve.api.stream.HEAVY", 10**9)
    plain = complete(server, **body)
    assert list(large["choices"][0]) and large["choices"] == plain["choices"]
    assert large.keys() == plain.keys() and large["usage"]["total_tokens"] == plain["usage"]["total_tokens"]


# Sizes


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "yes " * 20_000}),
        ("/tokenize", {"messages": [{"role": "user", "content": "yes " * 20_000}]}),
        ("/detokenize", {"tokens": [5] * 70_000}),
        ("/v1/embeddings", {"input": "yes " * 20_000}),
        ("/v1/completions", {"prompt": "yes " * 20_000, "echo": True, "max_tokens": 0, "logprobs": 1}),
    ],
)
def test_what_is_too_large_is_refused_by_its_size(server: Running, path: str, body: dict[str, Any]) -> None:
    error = refused(server, path, 413, **body)
    assert "this server takes 65536" in error["message"] and "512 tokens" in error["message"]


def test_neighbours_of_a_long_score_get_what_they_get_alone(server: Running) -> None:
    """While a prompt is scored a few rows a step."""
    alone = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
    steps = server.engine.counts.steps
    prompt = [5 + place % 300 for place in range(480)]
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(complete, server, prompt=prompt, max_tokens=1, prompt_logprobs=5)
        beside = [complete(server, return_token_ids=True)["choices"][0]["token_ids"]]
        while not scored.done():
            beside.append(complete(server, return_token_ids=True)["choices"][0]["token_ids"])
    assert len(scored.result()["choices"][0]["prompt_logprobs"]) == 480
    assert server.engine.counts.steps - steps >= 480 // 16
    assert all(tokens == alone for tokens in beside)


# /generate: SGLang


def generated(server: Running, **body: Any) -> Any:
    sampling = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True} | body.pop("sampling_params", {})
    answer = server.post("/generate", body | {"sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    assert "x-moesaic-ignored" not in answer.headers
    return answer.json()


def test_generate_takes_and_gives_tokens(server: Running, theirs: Any) -> None:
    tokens = theirs.encode(TEXT)
    plain = complete(server, return_token_ids=True)["choices"][0]
    for prompt in ({"text": TEXT}, {"input_ids": tokens}):
        found = generated(server, **prompt, rid="mine")
        assert found["output_ids"] == plain["token_ids"] and found["text"] == plain["text"]
        meta = found["meta_info"]
        assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 6}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(tokens), 6)
        assert "output_token_logprobs" not in meta
    several = generated(server, input_ids=[tokens, [5, 6]], sampling_params={"n": 2, "temperature": 1.0})
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert [one["meta_info"]["prompt_tokens"] for one in several] == [len(tokens)] * 2 + [2] * 2
    end = theirs.eos_token_id
    stopped = generated(server, text=TEXT, sampling_params={"ignore_eos": False, "logit_bias": {str(end): 100}})
    assert stopped["output_ids"] == [end] and stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}


@pytest.mark.parametrize("start", [-1, 0, 4])
def test_generate_with_log_probabilities(server: Running, log_of: Any, start: int) -> None:
    tokens = list(range(5, 25))
    meta = generated(
        server,
        input_ids=tokens,
        return_logprob=True,
        logprob_start_len=start,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )["meta_info"]
    written = [entry[1] for entry in meta["output_token_logprobs"]]
    log_TV = log_of(tokens + written)
    expected = [float(log_TV[place, token]) for place, token in enumerate((tokens + written)[1:])]
    assert [entry[0] for entry in meta["output_token_logprobs"]] == pytest.approx(expected[19:], abs=1e-4)
    assert [entry[2] for entry in meta["output_token_logprobs"]] == [
        server.service.token_decoder.text(t) for t in written
    ]
    assert all(len(top) == 2 for top in meta["output_top_logprobs"])
    if start < 0:
        assert "input_token_logprobs" not in meta
        return
    assert start + len(meta["input_token_logprobs"]) == meta["prompt_tokens"] == 20
    assert [entry[1] for entry in meta["input_token_logprobs"]] == tokens[start:]
    own = [entry[0] for entry in meta["input_token_logprobs"]]
    assert (own[0] is None) == (start == 0)
    assert own[1:] == pytest.approx(expected[start:19], abs=1e-4)
    assert len(meta["input_top_logprobs"]) == len(own)


def test_generate_reports_given_tokens(server: Running, log_of: Any) -> None:
    found = generated(server, input_ids=[5, 6], return_logprob=True, token_ids_logprob=[9, 50])
    log_TV = log_of([5, 6, *found["output_ids"]])
    for place, entries in enumerate(found["meta_info"]["output_token_ids_logprobs"], 1):
        assert [entry[1] for entry in entries] == [9, 50]
        assert [entry[0] for entry in entries] == pytest.approx(log_TV[place, [9, 50]].tolist(), abs=1e-4)


def test_generate_scores_without_generating(server: Running) -> None:
    body: dict[str, Any] = {"input_ids": [5, 6, 7], "return_logprob": True, "logprob_start_len": 0}
    found = generated(server, **body, sampling_params={"max_new_tokens": 0})
    assert found["text"] == "" and found["output_ids"] == [] and found["meta_info"]["completion_tokens"] == 0
    assert len(found["meta_info"]["input_token_logprobs"]) == 3
    end = {str(server.service.tokenizer.fast.token_to_id(server.service.tokenizer.special("eos_token") or "")): 100}
    found = generated(server, **body, sampling_params={"max_new_tokens": 0, "ignore_eos": False, "logit_bias": end})
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_generate_streams_all_so_far(server: Running) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}}
    whole = server.post("/generate", body).json()
    events = streamed(server, "/generate", **body)
    assert [len(one["output_ids"]) for one in events] == sorted(len(one["output_ids"]) for one in events)
    assert events[-1]["output_ids"] == whole["output_ids"] and events[-1]["text"] == whole["text"]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert all(one["meta_info"]["finish_reason"] is None for one in events[:-1])
    last = streamed(server, "/generate", **body, return_logprob=True)[-1]["meta_info"]
    assert [entry[1] for entry in last["output_token_logprobs"]] == whole["output_ids"]


def test_generate_follows_a_form(server: Running) -> None:
    assert generated(server, text="x", sampling_params={"regex": "(yes|no)", "ignore_eos": False})["text"] in (
        "yes",
        "no",
    )


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "text"),
        ({"text": "x", "input_ids": [5]}, "text"),
        ({"input_ids": [400]}, "prompt"),
        ({"text": "x", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        (
            {"text": "x", "sampling_params": {"max_new_tokens": 4, "min_new_tokens": 9}},
            "sampling_params.min_new_tokens",
        ),
        ({"text": "x", "return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"text": "x", "image_data": "y"}, "image_data"),
    ],
)
def test_generate_names_what_is_wrong(server: Running, body: dict[str, Any], place: str) -> None:
    assert refused(server, "/generate", **body)["param"] == place
