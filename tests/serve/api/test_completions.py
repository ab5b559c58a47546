"""Plain completions, by the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.serve.api.running import NAME, Running

PROMPT = "The number 7 is"


def ask(client: openai.OpenAI, **wishes: Any) -> Any:
    usual = {"model": NAME, "prompt": PROMPT, "temperature": 0.0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    return client.completions.create(**usual | wishes)


def test_text_and_tokens_are_the_same_prompt(server: Running, client: openai.OpenAI) -> None:
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    by_text, by_tokens = ask(client), ask(client, prompt=tokens)
    assert by_text.choices[0].text == by_tokens.choices[0].text
    assert by_text.object == "text_completion"
    assert by_text.usage.prompt_tokens == len(tokens)
    assert by_text.choices[0].text


def test_several_prompts_are_answered_in_their_order(server: Running, client: openai.OpenAI) -> None:
    prompts = [PROMPT, "yes or no", "as you like it"]
    alone = [ask(client, prompt=prompt).choices[0].text for prompt in prompts]
    together = ask(client, prompt=prompts, n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [text for text in alone for _ in range(2)]
    tokens = [server.post("/tokenize", {"prompt": prompt}).json()["tokens"] for prompt in prompts]
    assert together.usage.prompt_tokens == sum(map(len, tokens))
    assert [choice.text for choice in ask(client, prompt=tokens).choices] == alone


def test_stream_joined_is_the_whole(client: openai.OpenAI) -> None:
    for wishes in ({}, {"echo": True, "logprobs": 1}, {"n": 2, "temperature": 1.0, "seed": 3}):
        whole = ask(client, **wishes)
        texts = [""] * len(whole.choices)
        offsets: list[list[int]] = [[] for _ in whole.choices]
        reasons: list[str | None] = [None] * len(whole.choices)
        for chunk in ask(client, stream=True, **wishes):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                if choice.logprobs:
                    offsets[choice.index] += choice.logprobs.text_offset
        assert texts == [choice.text for choice in whole.choices]
        assert reasons == [choice.finish_reason for choice in whole.choices]
        if "logprobs" in wishes:
            assert offsets[0] == whole.choices[0].logprobs.text_offset


def test_a_stream_tells_what_was_used_so_far_if_asked(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(client, stream=True, stream_options=options))
    used = [chunk.usage.completion_tokens for chunk in chunks]
    assert used == sorted(used) and used[0] < used[-1]
    options["continuous_usage_stats"] = False
    assert [chunk.usage for chunk in ask(client, stream=True, stream_options=options)][:-1] == [None] * len(chunks[:-1])


def test_echo_gives_log_probabilities_of_the_prompt(server: Running, client: openai.OpenAI) -> None:
    tokens = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    expected = server.engine.model.logprobs([tokens])[0].tolist()[-(len(tokens) - 1) :]
    for limit in (0, 3):
        answer = ask(client, echo=True, logprobs=2, max_tokens=limit)
        choice = answer.choices[0]
        assert choice.text.startswith(PROMPT)
        assert (choice.text == PROMPT) == (limit == 0)
        assert "".join(choice.logprobs.tokens[: len(tokens)]) == PROMPT
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(expected, abs=1e-4)
        assert len(choice.logprobs.tokens) == len(tokens) + limit
        assert answer.usage.completion_tokens == limit


def test_offsets_count_characters_that_are_several_tokens(server: Running, client: openai.OpenAI) -> None:
    prompt = "grüße 😀 yes"
    choice = ask(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0).choices[0]
    tokens, offsets = choice.logprobs.tokens, choice.logprobs.text_offset
    assert offsets[tokens.index("bytes:\\xf0")] == prompt.index("😀")
    whole = [(token, at) for token, at in zip(tokens, offsets, strict=True) if not token.startswith("bytes:")]
    assert whole[-1][1] > prompt.index("😀")
    assert all(prompt.startswith(token, at) for token, at in whole)


def test_offsets_after_half_a_character(server: Running, client: openai.OpenAI) -> None:
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    mark = tokenizer.special("eos_token") or ""
    half, rest = tokenizer.encode("é", special=False)
    first, *others = tokenizer.encode("\ufffd", special=False)  # the sign itself, which is a whole character
    [letter], [end] = tokenizer.encode("y", special=False), tokenizer.encode(mark, special=False)
    for prompt, text, expected in (
        ([letter, half, letter, letter], "y\ufffdyy", [0, 1, 2, 3]),
        ([letter, half, rest, letter], "yéy", [0, 1, 1, 2]),
        ([half, half, rest, letter], "\ufffdéy", [0, 1, 1, 2]),
        ([rest, half, half, letter], "\ufffd\ufffd\ufffdy", [0, 1, 2, 3]),
        ([first, *others, letter], "\ufffdy", [0] * (1 + len(others)) + [1]),
        ([half, end, letter], f"\ufffd{mark}y", [0, 1, 1 + len(mark)]),
    ):
        choice = ask(client, prompt=prompt, echo=True, logprobs=0, max_tokens=0).choices[0]
        assert (choice.text, choice.logprobs.text_offset) == (text, expected)


def test_offsets_pass_over_marks_that_are_not_in_the_text(server: Running, client: openai.OpenAI) -> None:
    assert server.engine.tokenizer is not None
    mark = server.engine.tokenizer.special("eos_token")
    assert mark is not None
    bias = {"logit_bias": {str(server.post("/tokenize", {"prompt": mark}).json()["tokens"][0]): 100}}
    said = ask(client, prompt="yes", echo=True, logprobs=0, max_tokens=3, **bias).choices[0]
    assert (said.text, said.logprobs.tokens[-3:]) == ("yes", [mark] * 3)
    assert said.logprobs.text_offset[-3:] == [3, 3, 3]
    sent = ask(client, prompt=f"yes{mark}no", echo=True, logprobs=0, max_tokens=0).choices[0].logprobs
    assert sent.text_offset[sent.tokens.index(mark) + 1] == len(f"yes{mark}")


def test_best_of_gives_the_likeliest(client: openai.OpenAI) -> None:
    wishes = {"temperature": 1.0, "seed": 4, "logprobs": 0}
    every = ask(client, n=6, **wishes)
    best = ask(client, n=2, best_of=6, **wishes)

    def mean(choice: Any) -> float:
        found = choice.logprobs.token_logprobs
        return float(sum(found) / len(found))

    ranked = sorted(every.choices, key=mean, reverse=True)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == 6 * 12


@pytest.mark.parametrize(
    ("wishes", "param"),
    [
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [399_999]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "word " * 2000}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ],
)
def test_what_cannot_be_is_refused(client: openai.OpenAI, wishes: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **wishes)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_tokens_there_and_back(server: Running) -> None:
    for text in ("The number 12", "grüße 😀\n", ""):
        found = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 512
        assert server.post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": text, "content": text}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "yes"}]}).json()
    text = server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"]
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    assert text == tokenizer.chat([{"role": "user", "content": "yes"}])
