"""Ollama's API, by what its own clients and suites rely on."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any

import httpx
import pytest

from tests.peers.scripted import saying
from tests.serve.api.running import NAME, Running

HELLO = [{"role": "user", "content": "One number, as you like it"}]
DURATIONS = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration"}
COUNTS = {"prompt_eval_count", "eval_count"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'


def post(server: Running, path: str, **body: Any) -> httpx.Response:
    return server.post(f"/api/{path}", {"model": NAME, **body})


def chat(server: Running, messages: Any = HELLO, **wishes: Any) -> Any:
    options = {"temperature": 0, "num_predict": 12} | wishes.pop("options", {})
    answer = post(server, "chat", messages=messages, stream=False, options=options, **wishes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generate(server: Running, prompt: str = "yes or", **wishes: Any) -> Any:
    options = {"temperature": 0, "num_predict": 12} | wishes.pop("options", {})
    answer = post(server, "generate", prompt=prompt, stream=False, options=options, **wishes)
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return str(answer.json()["error"])


class TestChat:
    def test_one_reply_has_counts_and_durations(self, server: Running) -> None:
        found = chat(server)
        assert found["model"] == NAME and found["done"] is True and found["done_reason"] == "length"
        assert found["message"]["role"] == "assistant" and isinstance(found["message"]["content"], str)
        assert found.keys() >= DURATIONS | COUNTS
        assert all(isinstance(found[name], int) for name in DURATIONS | COUNTS)
        assert found["total_duration"] == found["prompt_eval_duration"] + found["eval_duration"] > 0
        assert found["eval_count"] == 12
        datetime.fromisoformat(found["created_at"])

    def test_is_the_chat_of_openai(self, server: Running) -> None:
        messages: Any = [{"role": "system", "content": "Count."}, *HELLO]
        theirs = server.client().chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=12)
        found = chat(server, messages)
        assert found["message"]["content"] == theirs.choices[0].message.content
        assert theirs.usage is not None
        assert (found["prompt_eval_count"], found["eval_count"]) == (theirs.usage.prompt_tokens, 12)

    def test_streams_unless_told_not_to(self, server: Running) -> None:
        for more in ({}, {"stream": None}, {"stream": True}):
            parts = lines(post(server, "chat", messages=HELLO, options={"temperature": 0, "num_predict": 12}, **more))
            assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
            assert len(parts) > 3
            text = "".join(part["message"]["content"] for part in parts)
            assert text == chat(server)["message"]["content"]
            assert parts[-1].keys() >= DURATIONS | COUNTS and "eval_count" not in parts[0]

    def test_the_latest_tag(self, server: Running) -> None:
        found = server.post("/api/chat", {"model": f"{NAME}:latest", "messages": HELLO, "stream": False,
                                          "options": {"num_predict": 2}}).json()  # fmt: skip
        assert found["model"] == f"{NAME}:latest" and found["done"]

    def test_a_model_that_is_not_there(self, server: Running) -> None:
        for stream in (True, False):
            answer = server.post("/api/chat", {"model": "nobody", "messages": HELLO, "stream": stream})
            assert refused(answer, 404) == "model 'nobody' not found"

    def test_no_messages_load_and_unload(self, server: Running) -> None:
        found = post(server, "chat", stream=False).json()
        assert found["done_reason"] == "load" and found["message"] == {"role": "assistant", "content": ""}
        assert lines(post(server, "chat", messages=[], keep_alive=0))[0]["done_reason"] == "unload"

    def test_keep_alive_is_taken_in_every_form(self, server: Running) -> None:
        for value in (0, 300, "5m", -1, "-1", None):
            assert chat(server, keep_alive=value, options={"num_predict": 1})["done"]

    def test_roles_in_capitals(self, server: Running) -> None:
        loud = [{**HELLO[0], "role": "USER"}]
        assert chat(server, loud)["message"]["content"] == chat(server)["message"]["content"]

    def test_log_probabilities(self, server: Running) -> None:
        found = chat(server, logprobs=True, top_logprobs=2, options={"num_predict": 3})["logprobs"]
        assert len(found) == 3
        assert all(one["logprob"] <= 0 and len(one["top_logprobs"]) == 2 for one in found)
        streamed = lines(post(server, "chat", messages=HELLO, logprobs=True, options={"num_predict": 3}))
        assert sum(len(part.get("logprobs", ())) for part in streamed) == 3
        assert "logprobs" not in chat(server, options={"num_predict": 3})
        assert "top_logprobs" in refused(post(server, "chat", messages=HELLO, logprobs=True, top_logprobs=21))

    def test_pictures_are_refused_in_words(self, server: Running) -> None:
        answer = post(server, "chat", messages=[{**HELLO[0], "images": ["aGk="]}])
        assert "messages.0.images" in refused(answer) and "text only" in refused(answer)
        assert chat(server, [{**HELLO[0], "images": []}], options={"num_predict": 1})["done"]

    def test_the_oldest_turns_are_left_out_of_what_is_too_long(self, server: Running) -> None:
        turn = [{"role": "user", "content": "yes or no " * 20}, {"role": "assistant", "content": "no"}]
        long = [{"role": "system", "content": "Count."}, *(turn * 12), *HELLO]
        answer = post(server, "chat", messages=long, stream=False, truncate=False)
        assert "messages" in refused(answer)
        found = chat(server, long, options={"num_predict": 2})
        kept = next(n for n in range(12, 0, -1) if fits(server, [long[0], *(turn * n), *HELLO]))
        assert found["prompt_eval_count"] == prompt_length(server, [long[0], *(turn * kept), *HELLO])
        assert "messages" in refused(post(server, "chat", messages=[{"role": "user", "content": "yes " * 900}]))

    def test_an_answer_that_was_begun_goes_on(self, server: Running) -> None:
        begun = [*HELLO, {"role": "assistant", "content": "The number"}]
        count = chat(server, begun, options={"num_predict": 1})["prompt_eval_count"]
        assert count == prompt_length(server, HELLO) + len(tokens_of(server, "The number"))


def tokens_of(server: Running, text: str) -> list[int]:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.encode(text, special=False)


def prompt_length(server: Running, messages: Any) -> int:
    assert server.engine.tokenizer is not None
    return len(tokens_of(server, server.engine.tokenizer.chat(messages)))


def fits(server: Running, messages: Any) -> bool:
    return prompt_length(server, messages) < server.engine.max_length


class TestOptions:
    def test_a_seed(self, server: Running) -> None:
        texts = {
            chat(server, options={"temperature": 1.0, "seed": seed})["message"]["content"] for seed in (1, 1, 2, 3)
        }
        assert len(texts) == 3

    def test_whole_numbers_however_they_are_written(self, server: Running) -> None:
        found = chat(server, options={"num_predict": 3.0, "top_k": 40.0, "seed": 1.0})
        assert found["eval_count"] == 3
        assert "options.top_k" in refused(post(server, "chat", messages=HELLO, options={"top_k": 1.5}))

    def test_below_one_is_as_many_as_fit(self, server: Running) -> None:
        for most in (-1, -2, 0):
            found = generate(server, raw=True, options={"num_predict": most, "stop": ["\n", "a", "e", "_"]})
            assert found["eval_count"] > 0

    def test_stop_words(self, server: Running) -> None:
        text = generate(server, raw=True)["response"]
        word = text[len(text) // 2 :][:2]
        for stop in (word, [word], ["", word]):
            found = generate(server, raw=True, options={"stop": stop})
            assert found["response"] == text[: text.index(word)] and found["done_reason"] == "stop"

    @pytest.mark.parametrize(
        "options",
        [
            {"top_k": 1, "temperature": 1.0},
            {"top_p": 0.0, "temperature": 1.0},
            {"min_p": 1.0, "temperature": 1.0},
        ],
    )
    def test_cuts_that_leave_one_token(self, server: Running, options: dict[str, Any]) -> None:
        assert generate(server, options=options)["response"] == generate(server)["response"]

    def test_all_that_choose_tokens_are_taken(self, server: Running) -> None:
        options = {
            **{"typical_p": 0.9, "repeat_last_n": 16, "repeat_penalty": 1.2, "presence_penalty": 0.5},
            **{"frequency_penalty": 0.5, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "temperature": 1},
        }
        answer = post(server, "chat", messages=HELLO, stream=False, options=options | {"num_predict": 4})
        assert answer.status_code == 200 and "x-moesaic-ignored" not in answer.headers

    def test_those_that_load_a_model_are_named_as_ignored(self, server: Running) -> None:
        answer = post(
            server, "generate", prompt="x", stream=False, options={"num_ctx": 64, "num_predict": 1, "num_gpu": 9}
        )
        assert answer.headers["x-moesaic-ignored"] == "options.num_ctx, options.num_gpu"

    @pytest.mark.parametrize("options", [{"temperature": "hot"}, {"top_p": 2}, {"num_predict": "many"}, {"stop": [1]}])
    def test_wrong_ones_are_named(self, server: Running, options: dict[str, Any]) -> None:
        problem = refused(post(server, "chat", messages=HELLO, options=options))
        assert problem.startswith(f"options.{next(iter(options))}")


class TestFormat:
    SCHEMA = {"type": "object", "properties": {"age": {"enum": [1, 2]}, "ok": {"type": "boolean"}},
              "required": ["age", "ok"]}  # fmt: skip

    def test_a_schema(self, server: Running) -> None:
        for found in (
            chat(server, format=self.SCHEMA, options={"num_predict": 100})["message"]["content"],
            generate(server, format=self.SCHEMA, options={"num_predict": 100})["response"],
        ):
            told = json.loads(found)
            assert set(told) == {"age", "ok"} and told["age"] in (1, 2)

    def test_json(self, server: Running) -> None:
        with saying(server, '{"a": 1}'):
            assert json.loads(chat(server, format="json", options={"num_predict": 50})["message"]["content"]) == {
                "a": 1
            }

    def test_none(self, server: Running) -> None:
        assert chat(server, format="")["message"] == chat(server, format=None)["message"] == chat(server)["message"]

    @pytest.mark.parametrize("wrong", ["xml", 3, {"type": "no such type"}])
    def test_what_is_none_is_refused(self, server: Running, wrong: Any) -> None:
        assert "format" in refused(post(server, "chat", messages=HELLO, format=wrong))


class TestTools:
    def test_a_call_has_its_arguments_as_an_object(self, server: Running) -> None:
        with saying(server, CALL):
            found = chat(server, tools=[WEATHER], options={"num_predict": 100})
        (call,) = found["message"]["tool_calls"]
        assert call["function"] == {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}
        assert call["id"] and found["message"]["content"] == "" and found["done_reason"] == "stop"

    def test_a_stream_sends_whole_calls(self, server: Running) -> None:
        with saying(server, f"Look: {CALL}{CALL}"):
            parts = lines(post(server, "chat", messages=HELLO, tools=[WEATHER], options={"num_predict": 200}))
        calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
        assert [call["function"]["index"] for call in calls] == [0, 1]
        assert all(call["function"]["arguments"] == {"city": "Rome"} for call in calls)
        assert "".join(part["message"]["content"] for part in parts).strip() == "Look:"

    def test_what_was_called_and_found_goes_back(self, server: Running) -> None:
        turn = [
            *HELLO,
            {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]},
            {"role": "tool", "tool_name": "weather", "content": "It rains."},
        ]
        assert server.engine.tokenizer is not None
        found = generate(server, options={"num_predict": 1})
        more = chat(server, turn, tools=[WEATHER], options={"num_predict": 1})
        assert more["prompt_eval_count"] > found["prompt_eval_count"] + 20

    def test_tools_that_are_none_are_refused(self, server: Running) -> None:
        wrong = {"type": "function", "function": {"name": "two words"}}
        assert "tools.0" in refused(post(server, "chat", messages=HELLO, tools=[wrong]))


class TestThinking:
    THOUGHT = "<think>So it is.</think>\nYes."

    def test_is_a_field_of_its_own(self, server: Running) -> None:
        with saying(server, self.THOUGHT):
            message = chat(server, think=True, options={"num_predict": 50})["message"]
            told = generate(server, think=True, options={"num_predict": 50})
        assert message["thinking"] == told["thinking"] == "So it is."
        assert message["content"].strip() == told["response"].strip() == "Yes."

    def test_streams_first(self, server: Running) -> None:
        with saying(server, self.THOUGHT):
            parts = lines(post(server, "chat", messages=HELLO, think="high", options={"num_predict": 50}))
        kinds = ["thinking" in part["message"] for part in parts if not part["done"]]
        assert kinds == sorted(kinds, reverse=True) and True in kinds and False in kinds


class TestGenerate:
    def test_is_one_turn_by_the_chat_template(self, server: Running) -> None:
        found = generate(server, HELLO[0]["content"], system="Count.")
        messages = [{"role": "system", "content": "Count."}, *HELLO]
        assert found["response"] == chat(server, messages)["message"]["content"]
        assert found.keys() >= DURATIONS | COUNTS | {"context"}

    def test_streams(self, server: Running) -> None:
        parts = lines(post(server, "generate", prompt="yes or", options={"temperature": 0, "num_predict": 12}))
        assert "".join(part["response"] for part in parts) == generate(server)["response"]
        assert "context" in parts[-1] and "context" not in parts[0]

    def test_context_goes_on_where_it_was(self, server: Running) -> None:
        first = generate(server)
        assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
        second = generate(server, "and no", context=first["context"])
        assert second["prompt_eval_count"] == len(first["context"]) + generate(server, "and no")["prompt_eval_count"]
        assert second["context"][: len(first["context"])] == first["context"]

    def test_raw_takes_the_prompt_as_it_is(self, server: Running) -> None:
        found = generate(server, raw=True)
        plain = server.client().completions.create(model=NAME, prompt="yes or", temperature=0, max_tokens=12)
        assert found["response"] == plain.choices[0].text and "context" not in found
        for wish in ({"system": "x"}, {"context": [1]}):
            assert next(iter(wish)) in refused(post(server, "generate", prompt="x", raw=True, **wish))

    def test_an_empty_prompt_loads(self, server: Running) -> None:
        assert post(server, "generate", stream=False).json()["done_reason"] == "load"
        assert post(server, "generate", prompt="", keep_alive="0s", stream=False).json()["done_reason"] == "unload"

    def test_what_is_not_offered_is_named(self, server: Running) -> None:
        assert "template" in refused(post(server, "generate", prompt="x", template="{{ .Prompt }}"))
        assert "images" in refused(post(server, "generate", prompt="x", images=["aGk="]))
        assert "suffix" in refused(post(server, "generate", prompt="x", suffix="y"))


class TestEmbed:
    def test_one_or_several(self, server: Running) -> None:
        one = post(server, "embed", input="yes").json()
        two = post(server, "embed", input=["yes", "no"]).json()
        assert len(one["embeddings"]) == 1 and len(two["embeddings"]) == 2
        assert one["embeddings"][0] == pytest.approx(two["embeddings"][0], abs=1e-5)
        assert math.isclose(sum(x * x for x in one["embeddings"][0]), 1.0, rel_tol=1e-4)
        assert two["prompt_eval_count"] > one["prompt_eval_count"] > 0 and two["total_duration"] > 0

    def test_dimensions(self, server: Running) -> None:
        (found,) = post(server, "embed", input="yes", dimensions=4).json()["embeddings"]
        assert len(found) == 4 and sum(x * x for x in found) == pytest.approx(1.0, rel=1e-4)

    def test_what_is_too_long_is_cut_off_unless_told_not_to(self, server: Running) -> None:
        long = "yes or no " * 500
        assert post(server, "embed", input=long).json()["prompt_eval_count"] == server.engine.max_length
        assert "input" in refused(post(server, "embed", input=long, truncate=False))

    def test_nothing(self, server: Running) -> None:
        assert post(server, "embed", input=[]).json()["embeddings"] == []
        assert post(server, "embed", input="").json()["embeddings"] == []
        assert "input" in refused(post(server, "embed"))

    def test_the_older_route(self, server: Running) -> None:
        found = post(server, "embeddings", prompt="yes").json()["embedding"]
        length = math.sqrt(sum(x * x for x in found))
        assert [x / length for x in found] == pytest.approx(
            post(server, "embed", input="yes").json()["embeddings"][0], abs=1e-5
        )
        assert post(server, "embeddings", prompt="").json() == {"embedding": []}


class TestModels:
    def test_tags_and_running(self, server: Running) -> None:
        with server.http() as client:
            tags, running = (client.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
        assert [one["name"] for one in tags] == [one["model"] for one in running] == [f"{NAME}:latest"]
        assert tags[0]["details"]["family"] == "qwen3_moe" and tags[0]["size"] > 0 and len(tags[0]["digest"]) == 64
        assert running[0]["context_length"] == server.service.context
        datetime.fromisoformat(running[0]["expires_at"])

    def test_show(self, server: Running) -> None:
        for name in ("model", "name"):
            found = server.post("/api/show", {name: f"{NAME}:latest"}).json()
            info = found["model_info"]
            assert info[f"{info['general.architecture']}.context_length"] == server.service.context
            assert set(found["capabilities"]) >= {"completion", "tools", "embedding"}
            assert "messages" in found["template"]
        assert refused(server.post("/api/show", {"model": "nobody"}), 404) == "model 'nobody' not found"

    def test_version_and_the_probe(self, server: Running) -> None:
        with server.http() as client:
            assert client.get("/api/version").json()["version"].count(".") == 2
            assert client.get("/", headers={"user-agent": "ollama-python/0.6"}).text == "Ollama is running"
            assert client.head("/", headers={"user-agent": "ollama/0.12 Go/1.24"}).status_code == 200
            assert client.get("/").headers["content-type"].startswith("text/html")

    def test_models_do_not_come_or_go(self, server: Running) -> None:
        for path in ("pull", "push", "create", "copy", "blobs/sha256:0"):
            assert "models" in refused(post(server, path), 501)
        with server.http() as client:
            assert "models" in refused(client.request("DELETE", "/api/delete", json={"model": NAME}), 501)

    def test_every_error_has_the_form(self, server: Running) -> None:
        with server.http() as client:
            refused(client.get("/api/nothing"), 404)
            refused(client.get("/api/chat"), 405)
            refused(client.post("/api/chat", content=b"{nonsense"))
            refused(client.post("/api/chat", json=[1]))

    def test_curl_without_a_content_type_but_not_from_a_page(self, server: Running) -> None:
        body = json.dumps({"model": NAME, "prompt": "x", "stream": False, "options": {"num_predict": 1}}).encode()
        with server.http() as client:
            assert client.post("/api/generate", content=body).json()["done"]
            refused(client.post("/api/generate", content=body, headers={"origin": "http://elsewhere.example"}))
