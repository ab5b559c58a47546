"""What the engine gives back equals what the model and other people's code say."""

from __future__ import annotations

import pytest
import torch

import moesaic
from moesaic.errors import UserError
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.serve.core.request import Sampling
from tests.model import oracle
from tests.serve.tiny import tiny_model

KINDS = ["glm4_moe-groups", "deepseek_v3-yarn", "glm_moe_dsa-shared", "mixtral-window-tied"]


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    theirs = oracle.save(request.param, path)
    return theirs, moesaic.load(path)


def prompts(vocab: int, lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


def test_greedy_answers_are_those_of_transformers(pair):
    theirs, ours = pair
    asked = prompts(ours.config.vocab, [5, 17, 1, 9])
    answers = moesaic.Engine(ours).generate(asked, max_tokens=12, temperature=0.0, ignore_eos=True)
    for prompt, answer in zip(asked, answers, strict=True):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(oracle.logits(theirs, tokens)[-1].argmax()))
        assert answer.tokens == tokens[len(prompt) :]
        assert answer.finish_reason == "length"


def test_log_probabilities_are_the_models_own(pair):
    _, ours = pair
    (asked,) = prompts(ours.config.vocab, [11])
    engine = moesaic.Engine(ours, page_size=4)
    (answer,) = engine.generate([asked], max_tokens=6, temperature=1.0, seed=3, logprobs=4, prompt_logprobs=2)
    expected = ours.logprobs([asked + answer.tokens])[0]
    found = [entry.logprob for entry in answer.prompt_logprobs[1:]] + [entry.logprob for entry in answer.logprobs]
    torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=1e-4)
    assert answer.prompt_logprobs[0] is None
    full = ours.logits([asked + answer.tokens])[0].log_softmax(-1)
    for place, entry in enumerate(answer.logprobs):
        values, tokens = full[len(asked) - 1 + place].topk(4)
        assert [token for token, _ in entry.top] == tokens.tolist()
        torch.testing.assert_close(torch.tensor([p for _, p in entry.top]), values, rtol=1e-4, atol=1e-4)


def test_prompt_log_probabilities_do_not_depend_on_chunks_or_cache(pair):
    from moesaic.serve.core.scheduling_policies.chunked import Chunked

    _, ours = pair
    (asked,) = prompts(ours.config.vocab, [30])
    whole = moesaic.Engine(ours).generate([asked], max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs
    engine = moesaic.Engine(ours, page_size=4, policy=Chunked(tokens=7))
    engine.generate([asked], max_tokens=1)
    pieces = engine.generate([asked], max_tokens=1, prompt_logprobs=0)[0].prompt_logprobs
    assert len(whole) == len(pieces) == 30
    for one, other in zip(whole[1:], pieces[1:], strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_recorded_routes_are_those_of_a_whole_forward(pair):
    _, ours = pair
    (asked,) = prompts(ours.config.vocab, [9])
    (answer,) = moesaic.Engine(ours).generate(
        [asked], max_tokens=5, temperature=0.0, ignore_eos=True, record_routes=True
    )
    routing = Routing()
    tokens = asked + answer.tokens[:-1]  # the last was chosen, not read
    with torch.inference_mode():
        ours(torch.tensor(tokens), Layout([len(tokens)]), routing)
    assert set(answer.routes) == set(routing.choices) != set()
    for layer, routes in routing.choices.items():
        assert torch.equal(answer.routes[layer].sort(-1).values, routes.sort(-1).values)


def test_embedding_is_the_mean_hidden_state(pair):
    from moesaic.serve.core.scheduling_policies.chunked import Chunked

    _, ours = pair
    (asked,) = prompts(ours.config.vocab, [13])
    engine = moesaic.Engine(ours, policy=Chunked(tokens=5))
    request = engine.request(asked, embed=True)
    engine.add(request)
    while request.finish_reason is None:
        engine.step()
    with torch.inference_mode():
        mean = ours(torch.tensor(asked), Layout([13])).mean(0)
    from moesaic.serve.core.request import completion

    expected = torch.nn.functional.normalize(mean, dim=0)
    torch.testing.assert_close(completion(request, "").embedding, expected, rtol=1e-4, atol=1e-5)
    assert engine.page_pool.in_use == 0


def test_new_weights_change_answers_and_versions(pair, tmp_path):
    _, ours = pair
    model = moesaic.load(_copy(ours, tmp_path))
    (asked,) = prompts(model.config.vocab, [33])
    engine = moesaic.Engine(model, page_size=4)
    before = engine.generate([asked], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
    request = engine.request(asked, Sampling(max_tokens=6, temperature=0.0, ignore_eos=True))
    engine.add(request)
    while request.written < 3:
        engine.step()
    with torch.no_grad():
        model.output.copy_(model.output.roll(7, 0))  # every token's logits are now another's
    engine.weights_changed()
    while request.finish_reason is None:
        engine.step()
    assert request.tokens[33:36] == before.tokens[:3]
    assert request.versions == [0, 0, 0, 1, 1, 1]
    after = request.tokens[33:]
    whole = model.logits([asked + after])[0].argmax(-1).tolist()
    assert after[3:] == whole[33 + 2 : 33 + 5]
    fresh = moesaic.Engine(model).generate([asked], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
    again = engine.generate([asked], max_tokens=4, temperature=0.0, ignore_eos=True)[0]
    assert again.tokens == fresh.tokens != before.tokens


def _copy(model, path):
    from moesaic.model.directory import save

    save(model, path / "copy")
    return path / "copy"


def test_a_paused_engine_does_nothing_and_goes_on_where_it_was(pair):
    _, ours = pair
    (asked,) = prompts(ours.config.vocab, [6])
    expected = moesaic.Engine(ours).generate([asked], max_tokens=5, temperature=0.0, ignore_eos=True)[0].tokens
    engine = moesaic.Engine(ours)
    request = engine.request(asked, Sampling(max_tokens=5, temperature=0.0, ignore_eos=True))
    engine.add(request)
    engine.step()
    engine.pause()
    assert engine.step() == [] and not engine.working and request.written == 1
    engine.resume()
    while request.finish_reason is None:
        engine.step()
    assert request.tokens[6:] == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "is empty"),
        ([1, 97], {}, "outside the vocabulary"),
        ([5] * 64, {}, "Shorten it"),
        ([5], {"max_tokens": 0}, "at least 1"),
        ([5], {"temperature": -1.0}, "between 0 and 100"),
        ([5], {"temperature": float("nan")}, "between 0 and 100"),
        ([5], {"top_p": 0.0}, "above 0"),
        ([5], {"logprobs": 101}, "between 0 and 100"),
        ([5], {"logit_bias": {97: 1.0}}, "outside the vocabulary"),
        ([5], {"adapter": "nobody"}, "there is no 'nobody'"),
        ("text", {}, "no tokenizer"),
        ([5], {"stop": ("a",)}, "no tokenizer"),
    ],
)
def test_a_wrong_request_is_refused_before_it_begins(tmp_path, prompt, options, message):
    oracle.save("mixtral-window-tied", tmp_path)
    engine = moesaic.Engine(moesaic.load(tmp_path))
    with pytest.raises(UserError, match=message):
        engine.generate([[5, 6], prompt], **options)
    assert engine.page_pool.in_use == 0 and not engine.working


def test_the_answer_ends_where_context_or_cache_end(tmp_path):
    oracle.save("mixtral-window-tied", tmp_path)
    model = moesaic.load(tmp_path)
    answer = moesaic.Engine(model).generate([[5] * 60], temperature=0.0, ignore_eos=True)[0]
    assert (len(answer.tokens), answer.finish_reason) == (4, "length")
    page = sum(torch.Size(shape).numel() for layer in model.cache_shapes() for shape in layer.values()) * 4 * 8
    engine = moesaic.Engine(model, page_size=8, cache_bytes=2 * page)
    answer = engine.generate([[5] * 10], temperature=0.0, ignore_eos=True)[0]
    assert (len(answer.tokens), answer.finish_reason) == (6, "length")
    with pytest.raises(UserError, match="hold no page"):
        moesaic.Engine(model, page_size=8, cache_bytes=page - 1)


def test_generate_sleeps_while_paused_and_goes_on_when_told(monkeypatch):
    engine = moesaic.Engine(tiny_model())
    expected = engine.generate([[5, 6, 7]], max_tokens=4, temperature=0.0)[0].tokens
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            engine.call(engine.resume)

    monkeypatch.setattr("moesaic.serve.core.engine.time.sleep", sleep)
    engine.pause()
    assert engine.generate([[5, 6, 7]], max_tokens=4, temperature=0.0)[0].tokens == expected
    assert len(slept) == 3 and all(seconds > 0 for seconds in slept)
