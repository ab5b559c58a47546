"""llama.cpp's own API, by the behaviour that its server's suite (tools/server/tests/unit) relies on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

import moesaic
from moesaic.serve.api.llamacpp.line_limits import LineLimits
from moesaic.serve.core.request import Request
from tests.peers.scripted import saying
from tests.serve.api.running import NAME, Running, running
from tests.serve.api.test_adapters import write_adapter

PROMPT = "The number 7 is a number; yes"
TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


def complete(server: Running, path: str = "/completion", **wishes: Any) -> Any:
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0.0, "ignore_eos": True, **wishes}
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Running, path: str = "/completion", **wishes: Any) -> list[dict[str, Any]]:
    body = {"prompt": PROMPT, "n_predict": 8, "temperature": 0.0, "ignore_eos": True, "stream": True, **wishes}
    with server.http() as client, client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and "[DONE]" not in lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refused(server: Running, path: str, body: Any, status: int = 400) -> str:
    """The message of an error in llama.cpp's form."""
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status and set(error) == {"code", "message", "type"}
    return str(error["message"])


def tokens_of(server: Running, text: str) -> list[int]:
    assert server.engine.tokenizer is not None
    return server.engine.tokenizer.encode(text)


class TestCompletion:
    @pytest.mark.parametrize("path", ["/completion", "/completions"])
    def test_has_text_counts_and_timings(self, server: Running, path: str) -> None:
        found = complete(server, path, cache_prompt=False)
        prompt = tokens_of(server, PROMPT)
        assert isinstance(found["content"], str) and found["stop"] is True and found["model"] == NAME
        assert found["tokens_predicted"] == 8 and found["tokens_evaluated"] == len(prompt)
        assert set(found["timings"]) == TIMINGS
        assert found["timings"]["prompt_n"] == len(prompt) and found["timings"]["predicted_n"] == 8
        assert found["timings"]["prompt_ms"] > 0 and found["timings"]["predicted_per_second"] > 0
        assert found["stop_type"] == "limit" and found["stopping_word"] == "" and found["truncated"] is False
        assert found["prompt"] == PROMPT and isinstance(found["has_new_line"], bool)

    def test_returns_tokens_only_where_asked(self, server: Running) -> None:
        assert complete(server)["tokens"] == []
        found = complete(server, return_tokens=True)
        assert len(found["tokens"]) == 8
        assert server.engine.tokenizer is not None
        assert server.engine.tokenizer.decode(found["tokens"]) == found["content"]

    def test_a_stream_joined_is_the_whole_answer(self, server: Running) -> None:
        parts = stream(server)
        assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
        assert "".join(part["content"] for part in parts) == complete(server)["content"]
        assert sum(len(part["tokens"]) for part in parts[:-1]) == 8
        assert all(part["tokens"] for part in parts[:-1])
        assert parts[-1]["timings"]["predicted_n"] == 8 and parts[-1]["generation_settings"]["stream"] is True

    def test_timings_in_every_part_of_a_stream(self, server: Running) -> None:
        assert all(set(part["timings"]) == TIMINGS for part in stream(server, timings_per_token=True))
        assert not any("timings" in part for part in stream(server)[:-1])

    def test_same_seed_same_text(self, server: Running) -> None:
        texts = {complete(server, temperature=1.0, seed=42)["content"] for _ in range(3)}
        others = {complete(server, temperature=1.0, seed=seed)["content"] for seed in range(4)}
        assert len(texts) == 1 and len(others) == 4

    @pytest.mark.parametrize("seed", [-1, 4294967295])
    def test_two_seeds_mean_a_random_one(self, server: Running, seed: int) -> None:
        found = [complete(server, temperature=1.0, seed=seed) for _ in range(2)]
        assert found[0]["generation_settings"]["seed"] != found[1]["generation_settings"]["seed"]

    def test_the_cache_changes_no_text(self, server: Running) -> None:
        kept, fresh = (complete(server, temperature=1.0, seed=9, cache_prompt=kept) for kept in (True, False))
        assert kept["content"] == fresh["content"] and fresh["tokens_cached"] == 0

    def test_a_prompt_is_reused(self, server: Running) -> None:
        long = PROMPT * 6
        complete(server, prompt=long)
        again = complete(server, prompt=long)
        assert again["tokens_cached"] > 0 and again["timings"]["cache_n"] == again["tokens_cached"]
        assert again["timings"]["prompt_n"] + again["timings"]["cache_n"] == again["tokens_evaluated"]

    def test_no_tokens_may_be_predicted(self, server: Running) -> None:
        found = complete(server, n_predict=0)
        assert found["content"] == "" and found["tokens_predicted"] == 0 and found["timings"]["predicted_n"] == 0

    def test_until_the_context_is_full(self, server: Running) -> None:
        found = complete(server, prompt="yes " * 200, n_predict=-1)
        assert found["truncated"] is True and found["stop_type"] == "limit"
        assert found["tokens_evaluated"] + found["tokens_predicted"] == server.engine.max_length

    def test_a_prompt_that_is_too_long_is_refused(self, server: Running) -> None:
        assert "tokens" in refused(server, "/completion", {"prompt": PROMPT * 200})

    def test_stops_at_a_word(self, server: Running) -> None:
        whole = complete(server, n_predict=24)["content"]
        word = whole[len(whole) // 2 :][:3]
        found = complete(server, n_predict=24, stop=["", word])
        assert found["content"] == whole[: whole.index(word)]
        assert found["stop_type"] == "word" and found["stopping_word"] == word

    def test_stops_at_the_end_of_the_text(self, server: Running) -> None:
        end = min(server.engine.stop_tokens)
        found = complete(server, ignore_eos=False, logit_bias=[[end, 100]])
        assert found["stop_type"] == "eos" and found["content"] == "" and found["stopping_word"] == ""

    def test_negative_temperature_is_greedy(self, server: Running) -> None:
        assert complete(server, temperature=-1)["content"] == complete(server)["content"]

    def test_other_names_of_the_number_of_tokens(self, server: Running) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            body = {"prompt": PROMPT, name: 3, "ignore_eos": True}
            assert server.post("/completion", body).json()["tokens_predicted"] == 3

    def test_only_some_fields(self, server: Running) -> None:
        fields = ["content", "generation_settings/n_predict", "prompt", "no_such/field"]
        found = complete(server, response_fields=fields)
        assert set(found) == {"content", "generation_settings/n_predict", "prompt"}
        assert found["generation_settings/n_predict"] == 8

    def test_settings_are_told_as_they_were(self, server: Running) -> None:
        wishes = {
            "temperature": 0.5,
            "top_k": 7,
            "repeat_penalty": 1.25,
            "seed": 3,
            "stop": ["zz"],
            "dry_multiplier": 0.5,
        }
        told = complete(server, **wishes)["generation_settings"]
        assert {name: told[name] for name in wishes} == wishes
        assert told["n_predict"] == told["max_tokens"] == 8

    def test_samplers_switch_others_off(self, server: Running) -> None:
        found = complete(server, temperature=1.0, top_k=1, seed=1, samplers=["temperature"])["generation_settings"]
        assert found["samplers"] == ["temperature"] and found["top_k"] == 0
        one = complete(server, temperature=1.0, top_k=1, samplers=["top_k", "temperature"])
        assert one["content"] == complete(server)["content"]

    def test_several_of_one_prompt(self, server: Running) -> None:
        found = complete(server, n_cmpl=3, temperature=1.0, seed=5)
        assert [one["index"] for one in found] == [0, 1, 2]
        assert len({one["content"] for one in found}) == 3

    def test_what_slots_would_do_is_named_as_ignored(self, server: Running) -> None:
        answer = server.post("/completion", {"prompt": "yes", "n_predict": 1, "id_slot": 2, "n_keep": 4})
        assert answer.json()["id_slot"] == -1
        assert answer.headers["x-moesaic-ignored"] == "id_slot, n_keep"

    def test_ends_at_a_line_that_is_indented_less(self, server: Running) -> None:
        with saying(server, "  yes\n    no\n\n  as you\nlike it\n"):
            whole = complete(server, n_predict=60, n_indent=2)
            parts = stream(server, n_predict=60, n_indent=2)
            deeper = complete(server, n_predict=60, n_indent=3)
            free = complete(server, n_predict=60, ignore_eos=False)
        assert whole["content"] == "  yes\n    no\n\n  as you\n" and whole["stop_type"] == "limit"
        assert "".join(part["content"] for part in parts) == whole["content"] and parts[-1]["stop"] is True
        assert deeper["content"] == "  yes\n    no\n\n"
        assert free["content"].endswith("like it\n") and free["stop_type"] == "eos"

    def test_ends_after_a_time_once_there_is_a_line(self) -> None:
        limits, request = LineLimits(milliseconds=50), Request([1])
        request.first_token, request.last_token = 10.0, 10.04
        assert limits.kept("a\nb", request) is None
        request.last_token = 10.06
        assert limits.kept("a\nb", request) == 3 and limits.kept("ab", request) is None

    def test_what_an_editor_sends(self, server: Running) -> None:
        """As llama.vim and llama.vscode ask, but for the route."""
        body = {
            **{
                "prompt": PROMPT,
                "n_predict": 8,
                "stop": [],
                "n_indent": 4,
                "top_k": 40,
                "top_p": 0.99,
                "stream": False,
            },
            **{"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500},
            **{"t_max_predict_ms": 1000, "id_slot": 0, "response_fields": ["content", "timings/prompt_n", "truncated"]},
        }
        answer = server.post("/completion", body)
        assert set(answer.json()) == {"content", "timings/prompt_n", "truncated"}
        assert set(answer.headers["x-moesaic-ignored"].split(", ")) == {"t_max_prompt_ms", "id_slot", "samplers.infill"}

    @pytest.mark.parametrize("wish", [{"min_keep": 2}, {"n_probs": -1}, {"prompt": {"no": 1}}, {"prompt": []}])
    def test_what_cannot_be_is_refused_by_name(self, server: Running, wish: dict[str, Any]) -> None:
        assert next(iter(wish)) in refused(server, "/completion", {"prompt": PROMPT, "n_predict": 1, **wish})

    def test_errors_below_the_route_have_the_form(self, server: Running) -> None:
        with server.http() as client:
            answer = client.post("/completion", content=b"{nonsense")
            assert answer.status_code == 400 and answer.json()["error"]["code"] == 400
            assert client.get("/completion").json()["error"]["code"] == 405

    def test_curl_without_a_content_type(self, server: Running) -> None:
        with server.http() as client:
            answer = client.post("/completion", content=json.dumps({"prompt": "yes", "n_predict": 2}).encode())
        assert answer.json()["tokens_predicted"] == 2


class TestPrompts:
    def test_tokens_and_texts(self, server: Running) -> None:
        tokens = tokens_of(server, PROMPT)
        whole = complete(server)["content"]
        assert complete(server, prompt=tokens)["content"] == whole
        many = complete(server, prompt=[tokens, PROMPT, {"prompt_string": PROMPT}])
        assert [one["content"] for one in many] == [whole] * 3
        assert [one["index"] for one in many] == [0, 1, 2]

    def test_both_in_one_prompt(self, server: Running) -> None:
        found = complete(server, prompt=[1, 2, "yes", 3, "no"])
        assert found["tokens_evaluated"] == 3 + len(tokens_of(server, "yes")) + len(tokens_of(server, "no"))

    def test_pictures_are_refused(self, server: Running) -> None:
        prompt = {"prompt_string": "yes <__media__>", "multimodal_data": ["aGk="]}
        assert "multimodal_data" in refused(server, "/completion", {"prompt": prompt})

    @pytest.mark.parametrize("prompt", [[1, [2, 3]], [[1, {}]], [[]], 5, ""])
    def test_nonsense_is_refused(self, server: Running, prompt: Any) -> None:
        assert "prompt" in refused(server, "/completion", {"prompt": prompt, "n_predict": 1})


class TestProbabilities:
    def test_beside_every_token(self, server: Running) -> None:
        found = complete(server, n_probs=5, n_predict=4)["completion_probabilities"]
        assert len(found) == 4
        for token in found:
            assert token["logprob"] <= 0 and len(token["top_logprobs"]) == 5
            best = token["top_logprobs"][0]
            assert (best["id"], best["logprob"]) == (token["id"], token["logprob"])
            assert all(set(one) == {"id", "token", "bytes", "logprob"} for one in token["top_logprobs"])

    def test_are_those_of_the_model(self, server: Running) -> None:
        found = complete(server, n_probs=3, n_predict=1)["completion_probabilities"][0]
        logits_V = server.engine.model.logits([tokens_of(server, PROMPT)])[0][-1].log_softmax(-1)
        for one in found["top_logprobs"]:
            assert one["logprob"] == pytest.approx(float(logits_V[one["id"]]), abs=1e-4)

    def test_in_a_stream(self, server: Running) -> None:
        parts = stream(server, n_probs=2, n_predict=4)
        assert all(len(part["completion_probabilities"]) == len(part["tokens"]) for part in parts[:-1])
        assert "completion_probabilities" not in parts[-1]

    @pytest.mark.parametrize("wishes", [{}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 20, "repeat_penalty": 1.3}])
    def test_after_sampling(self, server: Running, wishes: dict[str, Any]) -> None:
        asked = {"temperature": 0.7, "seed": 2, "post_sampling_probs": True, "n_predict": 4, "n_probs": 20} | wishes
        for token in complete(server, **asked)["completion_probabilities"]:
            probs = [one["prob"] for one in token["top_probs"]]
            assert probs == sorted(probs, reverse=True) and 0 < token["prob"] <= 1
            assert all(0 < prob <= 1 for prob in probs) and sum(probs) <= 1 + 1e-4
            if len(probs) < 20:  # then these are all that could be drawn
                assert sum(probs) == pytest.approx(1.0, abs=1e-4)

    def test_after_sampling_is_the_softmax_of_what_was_kept(self, server: Running) -> None:
        asked = {"temperature": 0.5, "top_k": 3, "post_sampling_probs": True, "n_predict": 1, "n_probs": 3}
        token = complete(server, **asked)["completion_probabilities"][0]
        logits_V = server.engine.model.logits([tokens_of(server, PROMPT)])[0][-1] / 0.5
        kept = logits_V.topk(3)
        expected = dict(zip(kept.indices.tolist(), kept.values.softmax(-1).tolist()))
        assert {one["id"]: pytest.approx(one["prob"], abs=1e-4) for one in token["top_probs"]} == expected

    def test_greedy_draws_one_token(self, server: Running) -> None:
        token = complete(server, post_sampling_probs=True, n_probs=4, n_predict=1)["completion_probabilities"][0]
        assert token["prob"] == 1.0 and len(token["top_probs"]) == 1


class TestForms:
    def test_logit_bias_in_every_form(self, server: Running) -> None:
        first = complete(server, n_predict=1, return_tokens=True)["tokens"][0]
        for bias in ([[first, False]], [[first, -100]], {str(first): -100}):
            assert complete(server, n_predict=1, return_tokens=True, logit_bias=bias)["tokens"][0] != first
        number = tokens_of(server, "7")
        found = complete(server, n_predict=4, return_tokens=True, logit_bias=[["7", 100]])
        assert set(found["tokens"]) <= set(number)

    def test_json_schema(self, server: Running) -> None:
        schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
        found = complete(server, n_predict=64, json_schema=schema)
        assert json.loads(found["content"])["a"] in (1, 2) and found["stop_type"] == "eos"

    def test_grammar(self, server: Running) -> None:
        found = complete(server, n_predict=64, grammar='root ::= "yes" | "no"')
        assert found["content"] in ("yes", "no")

    def test_a_grammar_that_is_none_is_refused(self, server: Running) -> None:
        assert "grammar" in refused(server, "/completion", {"prompt": "yes", "grammar": "root := nonsense ("})


class TestEmbedding:
    def test_is_one_normalized_vector_in_a_list(self, server: Running) -> None:
        for path in ("/embedding", "/embeddings"):
            (found,) = server.post(path, {"content": PROMPT}).json()
            assert found["index"] == 0 and len(found["embedding"]) == 1
            assert math.isclose(sum(x * x for x in found["embedding"][0]), 1.0, rel_tol=1e-4)

    def test_without_pooling_one_for_each_token(self, server: Running) -> None:
        (found,) = server.post("/embeddings", {"input": PROMPT, "pooling": "none"}).json()
        assert len(found["embedding"]) == len(tokens_of(server, PROMPT))
        assert all(abs(sum(x * x for x in row) - 1) > 1e-3 for row in found["embedding"])

    @pytest.mark.parametrize(("kind", "power"), [(1, 1), (2, 2), (3, 3)])
    def test_norms(self, server: Running, kind: int, power: int) -> None:
        (found,) = server.post("/embedding", {"content": PROMPT, "embd_normalize": kind}).json()
        assert sum(abs(x) ** power for x in found["embedding"][0]) == pytest.approx(1.0, rel=1e-4)

    def test_mixed_input(self, server: Running) -> None:
        found = server.post("/embedding", {"content": ["yes", [1, 2, "no"], [3]]}).json()
        assert [one["index"] for one in found] == [0, 1, 2]


class TestServer:
    def test_props(self, server: Running) -> None:
        with server.http() as client:
            found = client.get("/props").json()
        assert found["total_slots"] == server.engine.scheduler.max_requests
        assert found["default_generation_settings"]["n_ctx"] == server.engine.max_length
        assert "params" in found["default_generation_settings"] and "message" in found["chat_template"]
        assert found["modalities"] == {"vision": False, "audio": False} and found["is_sleeping"] is False
        assert str(Path(__file__).parents[2]) not in json.dumps(found)

    def test_slots_show_who_is_busy(self, server: Running) -> None:
        with server.http() as client:
            slots = client.get("/slots").json()
            assert client.get("/slots?fail_on_no_slot=1").status_code == 200
        assert len(slots) == server.engine.scheduler.max_requests
        assert not any(slot["is_processing"] for slot in slots) and "prompt" not in slots[0]

    def test_what_is_set_at_the_start_cannot_be_changed(self, server: Running) -> None:
        for path in ("/props", "/slots/0", "/lora-adapters"):
            refused(server, path, {}, status=501)
        with server.http() as client:
            assert client.get("/lora-adapters").json() == []

    def test_an_adapter_that_is_not_there(self, server: Running) -> None:
        assert "lora" in refused(server, "/completion", {"prompt": "yes", "lora": [{"id": 0, "scale": 1.0}]})
        assert complete(server, lora=[{"id": 0, "scale": 0.0}])["content"] == complete(server)["content"]

    def test_adapters_by_number_and_by_name(self, new_engine: Callable[..., moesaic.Engine], tmp_path: Path) -> None:
        path = write_adapter(tmp_path / "mine", 1)
        with running(new_engine(), allow_adapters=True) as own:
            assert own.post("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(path)}).status_code == 200
            with own.http() as client:
                assert client.get("/lora-adapters").json() == [{"id": 0, "path": "mine", "scale": 0.0}]
                assert [one["name"] for one in client.get("/api/tags").json()["models"]][-1] == "mine:latest"
            plain, adapted = (complete(own, lora=[{"id": 0, "scale": scale}], n_predict=20) for scale in (0.0, 1.0))
            assert plain["content"] == complete(own, n_predict=20)["content"] != adapted["content"]
            options = {"temperature": 0, "num_predict": 20}
            asked = {"model": "mine:latest", "prompt": PROMPT, "raw": True, "stream": False, "options": options}
            named = own.post("/api/generate", asked).json()["response"]
            assert adapted["content"].startswith(named) and named
            assert "lora" in refused(own, "/completion", {"prompt": "yes", "lora": [{"id": 0, "scale": 0.5}]})

    def test_timings_in_the_other_dialects(self, client: openai.OpenAI) -> None:
        extra = {"timings_per_token": True}
        message: Any = [{"role": "user", "content": "yes"}]
        plain = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, extra_body=extra)
        chat = client.chat.completions.create(model=NAME, messages=message, max_tokens=3, extra_body=extra)
        for found in (plain, chat):
            assert set(found.model_extra["timings"]) == TIMINGS  # type: ignore[index]
        for chunk in client.completions.create(model=NAME, prompt="x", max_tokens=3, stream=True, extra_body=extra):
            assert set(chunk.model_extra["timings"]) == TIMINGS  # type: ignore[index]
        without = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=1)
        assert "timings" not in (without.model_extra or {})
