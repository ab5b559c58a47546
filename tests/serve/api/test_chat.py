"""Chats, by the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.api.running import NAME, Running

HELLO: list[Any] = [{"role": "system", "content": "Count."}, {"role": "user", "content": "One number, as you like it"}]
GREEDY = {"model": NAME, "messages": HELLO, "temperature": 0.0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    return client.chat.completions.create(**{**GREEDY, **wishes})


def test_says_what_the_model_says(server: Running, client: openai.OpenAI) -> None:
    answer = ask(client)
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.chat(HELLO), special=False)
    tokens = list(prompt)
    for _ in range(24):
        tokens.append(int(server.engine.model.logits([tokens])[0][-1].argmax()))
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(tokens[len(prompt) :])
    assert len(choice.message.content) > 10
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == NAME
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert answer.usage.total_tokens == len(prompt) + 24


@pytest.mark.parametrize("wishes", [{}, {"temperature": 1.0, "seed": 5, "n": 3}, {"logprobs": True, "top_logprobs": 2}])
def test_a_stream_joined_is_the_whole_answer(client: openai.OpenAI, wishes: dict[str, Any]) -> None:
    whole = ask(client, **wishes)
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    pieces, usage = 0, None
    for chunk in ask(client, stream=True, stream_options={"include_usage": True}, **wishes):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            pieces += bool(choice.delta.content)
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(entry.token for entry in choice.logprobs.content)
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}
    assert pieces > 5
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    if "logprobs" in wishes:
        assert tokens[0] == [entry.token for entry in whole.choices[0].logprobs.content]


def test_without_asking_there_is_no_usage_in_a_stream(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_n_answers_differ_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    first = ask(client, n=4, seed=11, temperature=1.0)
    again = ask(client, n=4, seed=11, temperature=1.0)
    other = ask(client, n=4, seed=12, temperature=1.0)
    said = [[choice.message.content for choice in answer.choices] for answer in (first, again, other)]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(said[0])) == 4
    assert said[0] == said[1] != said[2]
    assert first.usage.completion_tokens == 4 * 24


def test_logprobs_are_the_models(server: Running, client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 24
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.chat(HELLO), special=False)
    log_V = server.engine.model.logits([prompt])[0][-1].log_softmax(-1)
    values, indices = log_V.topk(3)
    assert [entry.logprob for entry in content[0].top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)
    assert content[0].logprob == content[0].top_logprobs[0].logprob
    spoken = b"".join(bytes(entry.bytes) for entry in content)
    assert spoken.decode(errors="replace") == answer.choices[0].message.content
    assert len(indices) == 3


def test_stop_strings_end_an_answer_wherever_tokens_end(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    for start in (3, 7, 12):
        stop = text[start : start + 4]
        answer = ask(client, stop=[stop, "never said"])
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(client, stop=stop, stream=True))
        assert answer.choices[0].message.content == streamed == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"


def test_penalties_bias_and_limits_reach_the_sampler(server: Running, client: openai.OpenAI) -> None:
    plain = ask(client).choices[0].message.content
    number = server.post("/tokenize", {"prompt": " number"}).json()["tokens"]
    assert len(number) == 1
    bias = {str(number[0]): 100.0}
    assert ask(client, logit_bias=bias, max_tokens=5).choices[0].message.content == " number" * 5
    half = {str(number[0]): 20.0}
    liked = ask(client, logit_bias=half).choices[0].message.content.count(" number")
    shunned = ask(client, logit_bias=half, frequency_penalty=2.0, presence_penalty=2.0)
    assert shunned.choices[0].message.content.count(" number") < liked
    repeated = ask(client, extra_body={"repetition_penalty": 5.0, "ignore_eos": True})
    assert repeated.choices[0].message.content != plain
    assert ask(client, max_completion_tokens=3).usage.completion_tokens == 3
    for alone in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        answer = ask(client, temperature=1.0, extra_body=alone | {"ignore_eos": True})
        assert answer.choices[0].message.content == plain
    free = ask(client, temperature=1.0, seed=3).choices[0].message.content
    assert free != plain
    stopped = ask(client, logit_bias=bias, extra_body={"stop_token_ids": number})
    assert (stopped.choices[0].finish_reason, stopped.usage.completion_tokens) == ("stop", 1)


def test_parts_of_a_message_are_lines_of_one_text(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "One number,"}, {"type": "text", "text": "as you like it"}]
    answer = ask(client, messages=[HELLO[0], {"role": "user", "content": parts}])
    whole = ask(client, messages=[HELLO[0], {"role": "user", "content": "One number,\nas you like it"}])
    assert answer.choices[0].message.content == whole.choices[0].message.content
    assert answer.usage.prompt_tokens == whole.usage.prompt_tokens


def test_what_was_refused_is_sent_back_whole(server: Running) -> None:
    def tokens(**said: Any) -> list[int]:
        messages = [HELLO[1], {"role": "assistant", **said}, HELLO[1]]
        return server.post("/tokenize", {"messages": messages}).json()["tokens"]

    plain = tokens(content="No, as you like it")
    assert tokens(content=[{"type": "refusal", "refusal": "No, as you like it"}]) == plain
    assert tokens(content=None, refusal="No, as you like it") == plain
    assert tokens(content="") != plain


def test_a_repeated_prompt_is_read_from_the_cache(client: openai.OpenAI) -> None:
    ask(client)
    usage = ask(client).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    salted = ask(client, extra_body={"cache_salt": "mine", "ignore_eos": True}).usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_prompt_logprobs(server: Running, client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"prompt_logprobs": 1}, max_tokens=1)
    found = answer.prompt_logprobs
    assert len(found) == answer.usage.prompt_tokens
    assert found[0] is None
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode(tokenizer.chat(HELLO), special=False)
    expected = server.engine.model.logprobs([prompt])[0].tolist()
    own = [entry[str(token)]["logprob"] for entry, token in zip(found[1:], prompt[1:], strict=True)]
    assert own == pytest.approx(expected[-len(own) :], abs=1e-4)
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra_body={"prompt_logprobs": 1}, stream=True)
    assert refused.value.param == "prompt_logprobs"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
