"""`parallel_branches` over HTTP: a stream in reading order, whole answers as the engine gives them, refusals."""

from __future__ import annotations

from typing import Any

import openai

from moesaic.serve.core.branches import FORK, answer_in_branches
from moesaic.serve.core.request import Sampling
from tests.serve.api.running import NAME, Running

PROMPT = "The number 7 is"


def wishes(server: Running, **more: Any) -> dict[str, Any]:
    """Nothing taught this model to fork: a bias makes it do so now and then."""
    (fork,) = server.post("/tokenize", {"prompt": FORK, "add_special_tokens": False}).json()["tokens"]
    extra = {"ignore_eos": True, "parallel_branches": 4} | more
    bias = {str(fork): 6.0}
    usual = {"model": NAME, "prompt": PROMPT, "temperature": 1.0, "seed": 4, "max_tokens": 16, "logit_bias": bias}
    return usual | {"extra_body": extra}


def test_an_answer_in_branches(server: Running, client: openai.OpenAI, new_engine: Any) -> None:
    whole = client.completions.create(**wishes(server))
    engine = new_engine()
    fork = engine.tokenizer.fast.token_to_id(FORK)
    sampling = Sampling(max_tokens=16, temperature=1.0, seed=4, logit_bias={fork: 6.0}, ignore_eos=True)
    expected = answer_in_branches(engine, PROMPT, sampling, max_branches=4)
    assert len(expected.branches) == 4
    assert whole.choices[0].text == expected.text
    assert whole.usage.completion_tokens == len(expected.tokens) == 4 * 16
    assert whole.choices[0].finish_reason == "length"
    chunks = list(client.completions.create(**wishes(server), stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert len(chunks) > 4 and chunks[-1].choices[0].finish_reason == "length"
    plain = client.completions.create(**wishes(server, parallel_branches=1))
    assert plain.usage.completion_tokens == 16


def test_what_does_not_go_together_is_refused(server: Running) -> None:
    for body, param in (
        ({"parallel_branches": 0}, "parallel_branches"),
        ({"parallel_branches": 4, "use_beam_search": True}, "parallel_branches"),
        ({"parallel_branches": 4, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"parallel_branches": 4, "guided_regex": "a+"}, "parallel_branches"),
    ):
        answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2} | body)
        assert answer.status_code == 400, body
        assert answer.json()["error"]["param"] == param
