"""Sampling as the suites of llama.cpp's, vLLM's and SGLang's servers check it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from moesaic.model.tokenizer import Tokenizer
from moesaic.serve.core.bad_words import token_sequences
from tests.serve.api.running import Running

PROMPT = "The number 7 is a number"
GREEDY = {"temperature": 0.0}
WORDS = (" number", " is", " yes", " and", " as")  # one token each, for the tiny tokenizer
LLAMA_CPP = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]


@pytest.fixture(scope="module")
def tokenizer(server: Running) -> Tokenizer:
    found = server.engine.tokenizer
    assert found is not None
    return found


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> list[int]:
    """Tokens whose texts tell them apart, so that a completion of them can be read."""
    tokens = [tokenizer.encode(word, special=False) for word in WORDS]
    assert all(len(one) == 1 for one in tokens)
    return [one[0] for one in tokens]


def ask(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True} | body)
    assert answer.status_code == 200, answer.text
    assert "x-moesaic-ignored" not in answer.headers
    found: dict[str, Any] = answer.json()
    return found


def text(server: Running, **body: Any) -> str:
    found = ask(server, **body)["choices"][0]["text"]
    assert isinstance(found, str)
    return found


def refused(server: Running, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4} | body)
    assert answer.status_code == 400, answer.text
    found: dict[str, Any] = answer.json()["error"]
    return found


# llama.cpp


SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"mirostat": 1, "mirostat_tau": 3.0},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.3},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.5},
    {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    {"dynatemp_range": 0.8, "dynatemp_exponent": 1.3},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["e"], "dry_penalty_last_n": -1},
    {"samplers": LLAMA_CPP, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
]


@pytest.mark.parametrize("sampling", SAMPLED, ids=lambda one: next(iter(one)) + str(one.get("mirostat", "")))
def test_the_same_seed_gives_the_same_text_also_beside_others(server: Running, sampling: dict[str, Any]) -> None:
    first = text(server, seed=42, **sampling)
    with ThreadPoolExecutor(4) as clients:
        asked = [clients.submit(text, server, seed=42 + n // 2, **sampling) for n in range(4)]
        texts = [one.result() for one in asked]
    assert texts[:2] == [first] * 2
    assert texts[2] == texts[3] != first


def test_different_seeds_give_different_texts(server: Running) -> None:
    assert len({text(server, seed=seed) for seed in range(4)}) == 4


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_logit_bias_by_token_or_text_as_pairs_or_object(
    server: Running, words: list[int], as_text: bool, as_object: bool
) -> None:
    keys: list[Any] = list(WORDS[:3]) if as_text else words[:3]
    biases: Any = {str(key): -100 for key in keys} if as_object else [[key, -100] for key in keys]
    found = text(server, logit_bias=biases, allowed_token_ids=words, seed=1)
    assert not any(word in found for word in WORDS[:3])
    assert any(word in found for word in WORDS[3:])


def test_a_logit_bias_of_false_is_never(server: Running, words: list[int]) -> None:
    for biases in ([[words[0], False], [WORDS[1], False]], {str(words[0]): False, WORDS[1]: False}):
        found = text(server, logit_bias=biases, allowed_token_ids=words[:3])
        assert found == WORDS[2] * 12


def test_logit_bias_in_a_chat(client: openai.OpenAI, words: list[int]) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "yes"}],
        max_tokens=5,
        logit_bias={str(words[1]): 100},
        temperature=0.0,
    )
    assert answer.choices[0].message.content == WORDS[1] * 5


def test_ignore_eos_goes_on_to_the_limit(server: Running, tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.stop_tokens
    ends = {"logit_bias": {str(end): 100}, "temperature": 0.0, "max_tokens": 6}
    stopped = ask(server, ignore_eos=False, **ends)
    assert (stopped["choices"][0]["finish_reason"], stopped["usage"]["completion_tokens"]) == ("stop", 1)
    free = ask(server, ignore_eos=True, **ends)
    assert (free["choices"][0]["finish_reason"], free["usage"]["completion_tokens"]) == ("length", 6)


def test_samplers_by_letters_and_by_any_of_their_names(server: Running) -> None:
    hot = {"seed": 3, "temperature": 1.5, "top_k": 30, "min_p": 0.05, "typical_p": 0.9, "xtc_probability": 0.3}
    named = text(server, samplers=LLAMA_CPP, **hot)
    assert text(server, samplers="edskypmxt", **hot) == named
    spelled = ["penalties", "dry", "top-n-sigma", "topk", "typical", "nucleus", "min-p", "xtc", "temp"]
    assert text(server, samplers=spelled, **hot) == named


def test_a_sampler_that_is_not_listed_is_off(server: Running) -> None:
    greedy = text(server, **GREEDY)
    assert text(server, samplers=["top_k"], top_k=1, temperature=2.0, min_p=0.5, seed=3) == greedy
    assert text(server, samplers=["temperature"], top_k=1, seed=3) == text(server, seed=3, samplers=["temperature"])
    assert text(server, samplers=["min_p"], temperature=0.0, seed=3) != greedy


def test_an_unknown_sampler_is_refused_by_name(server: Running) -> None:
    for given in (["top_k", "magic"], "kz"):
        error = refused(server, samplers=given)
        assert error["param"] == "samplers" and "top_k" in error["message"]
    assert "magic" in refused(server, samplers=["magic"])["message"]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}, {"top_n_sigma": 1e-3}], ids=str)
def test_a_cut_to_one_token_is_greedy_at_any_temperature(server: Running, cut: dict[str, Any]) -> None:
    assert text(server, temperature=1.7, seed=5, **cut) == text(server, **GREEDY)


def test_neutral_values_change_nothing(server: Running) -> None:
    """What llama.cpp's own page sends with every request."""
    neutral = {
        "dynatemp_range": 0, "dynatemp_exponent": 1, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1,
        "top_n_sigma": -1, "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0,
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "mirostat": 0,
        "mirostat_tau": 5, "mirostat_eta": 0.1, "bad_words": [], "top_k": 0, "min_p": 0,
    }  # fmt: skip
    assert text(server, seed=8, **neutral) == text(server, seed=8)


def test_xtc_takes_the_top_choices_away(server: Running, words: list[int]) -> None:
    for one, other in ((0, 1), (1, 2), (3, 4)):
        only = {"allowed_token_ids": [words[one], words[other]], "max_tokens": 1}
        struck = text(server, **only, xtc_probability=1.0, xtc_threshold=1e-4, seed=2)
        assert {struck, text(server, **only, **GREEDY)} == {WORDS[one], WORDS[other]}
    untouched = text(server, seed=2)
    assert text(server, xtc_probability=1.0, xtc_threshold=0.6, seed=2) == untouched  # above a half it is off


def test_dry_breaks_a_repetition_and_its_breakers_let_it_stand(server: Running, words: list[int]) -> None:
    loop = {"prompt": (WORDS[0] + WORDS[1]) * 8, "allowed_token_ids": words, "temperature": 0.0, "max_tokens": 8}
    steered = loop | {"logit_bias": {str(words[0]): 20, str(words[1]): 20}}
    dry = {"dry_multiplier": 50.0, "dry_allowed_length": 1, "dry_base": 2.0, "dry_penalty_last_n": 64}
    before, after = text(server, **steered), text(server, **steered, **dry)
    assert set(before.split()) <= {"number", "is"}
    assert set(after.split()) - {"number", "is"}
    # Every token holds one of these breakers: nothing is a repetition.
    assert text(server, **steered, **dry, dry_sequence_breakers=["n", "i", "s"]) == before
    assert refused(server, dry_multiplier=1.0, dry_sequence_breakers=[])["param"] == "dry_sequence_breakers"


def test_repeat_penalty_is_another_name_and_its_window_can_be_nothing(server: Running) -> None:
    strong = text(server, repetition_penalty=5.0, **GREEDY)
    assert text(server, repeat_penalty=5.0, **GREEDY) == strong != text(server, **GREEDY)
    assert text(server, repeat_penalty=5.0, repeat_last_n=0, **GREEDY) == text(server, **GREEDY)
    assert text(server, repeat_penalty=5.0, repeat_last_n=-1, **GREEDY) == strong


# vLLM


def test_many_params_together(server: Running) -> None:
    found = ask(
        server, temperature=1.2, presence_penalty=1.2, frequency_penalty=1.2, repetition_penalty=1.2, min_p=0.5,
        top_p=0.5, top_k=3, n=3, seed=1,
    )  # fmt: skip
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]


def test_bad_words_of_one_token(server: Running, words: list[int]) -> None:
    only = {"allowed_token_ids": words, "seed": 4, "logit_bias": {str(words[0]): 9, str(words[1]): 9}}
    assert {"number", "is"} <= set(text(server, **only).split())
    assert WORDS[0] not in text(server, **only, bad_words=[WORDS[0].strip()])  # also after a space
    assert not {"number", "is"} & set(text(server, **only, bad_words=["number", "is"]).split())


def test_bad_words_of_two_tokens_leave_each_of_them(server: Running, tokenizer: Tokenizer, words: list[int]) -> None:
    pair = WORDS[2] + WORDS[3]
    assert (words[2], words[3]) in token_sequences(tokenizer, (pair,), server.engine.model.config.vocab)
    only = {"allowed_token_ids": words[2:4], "max_tokens": 24, "seed": 3}
    assert pair in text(server, **only)
    without = text(server, **only, bad_words=[pair])
    assert pair not in without and {"yes", "and"} == set(without.split())
    assert refused(server, bad_words=[""])["param"] == "bad_words.0"
    assert refused(server, bad_words=[" "])["param"] == "bad_words"


def test_allowed_token_ids_force_a_token(server: Running, words: list[int]) -> None:
    for token, word in zip(words, WORDS, strict=True):
        assert text(server, allowed_token_ids=[token], max_tokens=2) == word * 2
    assert refused(server, allowed_token_ids=[])["param"] == "allowed_token_ids"
    assert refused(server, allowed_token_ids=[-1])["param"] == "allowed_token_ids.0"
    assert refused(server, allowed_token_ids=[10_000_000])["param"] == "allowed_token_ids"


def test_a_logit_bias_outside_the_vocabulary_is_named_with_its_size(server: Running) -> None:
    vocab = server.engine.model.config.vocab
    assert text(server, logit_bias={str(vocab - 1): 1.0})
    message = refused(server, logit_bias={str(vocab + 1): 1.0})["message"]
    assert str(vocab + 1) in message and str(vocab) in message
    assert refused(server, logit_bias={"1": "not_a_number"})["param"] == "logit_bias.1"


@pytest.mark.parametrize(("least", "most"), [(0, 8), (8, 12), (12, 12)])
def test_min_tokens_holds_off_the_end(server: Running, tokenizer: Tokenizer, least: int, most: int) -> None:
    (end,) = tokenizer.stop_tokens
    found = ask(
        server, ignore_eos=False, min_tokens=least, max_tokens=most, logit_bias={str(end): 100}, temperature=0.0
    )
    assert found["usage"]["completion_tokens"] == (most if least == most else least + 1)


def test_min_tokens_holds_off_stop_strings_and_stop_tokens(server: Running, words: list[int]) -> None:
    only = {"allowed_token_ids": words[:1], "min_tokens": 5, "max_tokens": 9}
    stopped = ask(server, **only, stop=["e", "a", " "])
    assert stopped["usage"]["completion_tokens"] == 6 and stopped["choices"][0]["finish_reason"] == "stop"
    held = ask(server, **only | {"allowed_token_ids": words[:2]}, stop_token_ids=[words[1]], seed=1)
    assert held["usage"]["completion_tokens"] > 5


def test_min_tokens_above_the_maximum_is_refused(server: Running) -> None:
    assert refused(server, min_tokens=5, max_tokens=4)["param"] == "min_tokens"
    assert refused(server, min_tokens=-1)["param"] == "min_tokens"


# Beam search, vLLM's


def test_beams_of_a_batch_differ_and_are_the_same_again(server: Running) -> None:
    body = {"prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 5, "use_beam_search": True, "temperature": 0.0}
    texts = [choice["text"] for choice in ask(server, **body)["choices"]]
    assert len(texts) == 4
    assert texts[0] != texts[1], "beams of one prompt"
    assert texts[:2] == texts[2:], "the same prompt twice"
    assert texts == [choice["text"] for choice in ask(server, **body)["choices"]]


def test_beams_come_best_first_and_are_better_than_greedy(server: Running) -> None:
    def total(choice: dict[str, Any]) -> float:
        return float(sum(choice["logprobs"]["token_logprobs"]))

    beams = ask(server, n=4, max_tokens=6, use_beam_search=True, logprobs=1)["choices"]
    totals = [total(choice) for choice in beams]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] >= total(ask(server, max_tokens=6, logprobs=1, **GREEDY)["choices"][0])
    assert all(choice["finish_reason"] == "length" for choice in beams)


def test_best_of_beams_are_followed_and_n_are_sent(server: Running) -> None:
    wide = ask(server, n=4, max_tokens=6, use_beam_search=True)["choices"]
    best = ask(server, n=2, best_of=4, max_tokens=6, use_beam_search=True)["choices"]
    assert [choice["text"] for choice in best] == [choice["text"] for choice in wide[:2]]


def test_a_length_penalty_and_early_stopping_decide_between_short_and_long(
    server: Running, tokenizer: Tokenizer
) -> None:
    (end,) = tokenizer.stop_tokens
    body = {"n": 3, "max_tokens": 8, "use_beam_search": True, "ignore_eos": False, "logit_bias": {str(end): 7.0}}
    short = ask(server, **body, length_penalty=-2.0, early_stopping="never")
    long = ask(server, **body, length_penalty=5.0, early_stopping="never")
    assert short["usage"]["completion_tokens"] < long["usage"]["completion_tokens"]
    early = ask(server, **body, early_stopping=True)
    assert [choice["finish_reason"] for choice in early["choices"]].count("stop") >= 1
    assert refused(server, **body, early_stopping="soon")["param"] == "early_stopping"


def test_beams_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "yes"}],
        n=3,
        max_tokens=5,
        logprobs=True,
        top_logprobs=2,
        extra_body={"use_beam_search": True},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    entries = [choice.logprobs.content for choice in answer.choices if choice.logprobs and choice.logprobs.content]
    tokens = [tuple((entry.token, tuple(entry.bytes or ())) for entry in found) for found in entries]
    assert len(entries) == 3 and all(len(entry.top_logprobs) == 2 for found in entries for entry in found)
    totals = [sum(entry.logprob for entry in found) for found in entries]
    assert totals == sorted(totals, reverse=True) and len(set(tokens)) >= 2
    assert answer.usage is not None and answer.usage.completion_tokens == sum(map(len, entries))


def test_what_beams_cannot_do_is_said(server: Running) -> None:
    beams = {"use_beam_search": True, "n": 2}
    assert refused(server, **beams, stream=True)["param"] == "stream"
    assert "grammar" in refused(server, **beams, guided_regex="a+")["message"]
    assert refused(server, use_beam_search=True, n=100)["param"] == "n"
    assert refused(server, **beams, prompt_logprobs=1)["param"] == "prompt_logprobs"
    assert refused(server, **beams, logprobs=1, logprob_token_ids=[5])["param"] == "logprob_token_ids"


# SGLang


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1), ("top_k", -2),
        ("frequency_penalty", 2.1), ("presence_penalty", -2.1), ("repetition_penalty", 0.0), ("min_tokens", -1),
        ("typical_p", 0.0), ("xtc_probability", 2.0), ("mirostat", 3), ("dry_base", 0.5), ("dry_allowed_length", 0),
        ("dynatemp_range", -1.0), ("repeat_last_n", -2), ("length_penalty", 1000.0), ("top_n_sigma", 1000.0),
    ],
    ids=str,
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(server: Running, name: str, value: float) -> None:
    assert refused(server, **{name: value})["param"] == name


@pytest.mark.parametrize(
    "edge",
    [{"top_p": 1.0}, {"min_p": 0.0}, {"min_p": 1.0}, {"frequency_penalty": -2.0}, {"repetition_penalty": 2.0},
     {"top_k": -1}],
    ids=str,
)  # fmt: skip
def test_values_at_the_edge_are_taken(server: Running, edge: dict[str, Any]) -> None:
    assert ask(server, **edge)["usage"]["completion_tokens"] == 12


def test_next_to_no_temperature_is_greedy(server: Running) -> None:
    assert text(server, temperature=1e-7, seed=9) == text(server, **GREEDY)


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty", "repetition_penalty"])
def test_penalties_make_a_text_more_various(server: Running, words: list[int], penalty: str) -> None:
    def variety(**sampling: Any) -> float:
        texts = [text(server, allowed_token_ids=words, seed=seed, max_tokens=10, **sampling) for seed in range(4)]
        return sum(len(set(one.split())) for one in texts)

    likely = {"logit_bias": {str(words[0]): 4.0}}
    assert variety(**likely, **{penalty: 2.0 if penalty != "repetition_penalty" else 3.0}) > variety(**likely)


def test_penalties_of_many_clients_at_once_stay_their_own(server: Running) -> None:
    kinds: list[dict[str, Any]] = [
        {}, {"frequency_penalty": 2.0}, {"presence_penalty": 1.0}, {"min_tokens": 12},
        {"frequency_penalty": 0.4, "presence_penalty": 0.8}, {"presence_penalty": -0.3, "frequency_penalty": 1.3},
        {"dry_multiplier": 1.0}, {"mirostat": 2}, {"bad_words": ["number"]},
    ]  # fmt: skip
    alone = [text(server, seed=6, **kind) for kind in kinds]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(lambda kind: text(server, seed=6, **kind), kinds * 2))
    assert together == alone * 2
