"""Beam search finds the beams that `transformers` finds, with the same scores, in whatever company."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.beams import BeamOptions, BeamSearch, beam_search
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from tests.random_models import save_random, small_config
from tests.serve.made import talking_model

VOCABULARY = 101


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Weights small enough that many continuations are nearly as likely as the best."""
    config = small_config(
        "qwen3_moe", VOCABULARY, hidden=32, ffn=32, layers=2, heads=(4, 2), head_dim=8,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, initializer_range=0.15,
    )  # fmt: skip
    return save_random(config, tmp_path_factory.mktemp("beams") / "tiny", seed=5)


@pytest.fixture(scope="module")
def theirs(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def model(directory):
    return moesaic.load(directory, dtype="float32", threads=1)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(1, VOCABULARY, (3 + 4 * n,), generator=generator).tolist() for n in range(count)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (4, 0.0), (5, 2.0), (3, -1.0)])
def test_beams_and_scores_are_those_of_transformers(model, theirs, width, length_penalty, early_stopping):
    engine, ended = Engine(model, cache_bytes=2**21), set()
    for prompt in prompts(4):
        # Tokens that are likely after a while end a text, so that beams end at all, and not all at once.
        likely = engine.generate([prompt], max_tokens=5, temperature=0.0, logprobs=3)[0].logprobs
        ends = sorted({likely[2].top[1][0], likely[4].token})
        with torch.inference_mode():
            expected = theirs.generate(
                torch.tensor([prompt]), num_beams=width, num_return_sequences=width, max_new_tokens=9, do_sample=False,
                length_penalty=length_penalty, early_stopping=early_stopping, eos_token_id=ends, pad_token_id=0,
                output_scores=True, return_dict_in_generate=True, top_k=None, top_p=None, temperature=None,
            )  # fmt: skip
        options = BeamOptions(width, length_penalty, early_stopping)
        found = beam_search(engine, prompt, options, Sampling(max_tokens=9, stop_tokens=frozenset(ends)))
        for ours, sequence, score in zip(found, expected.sequences, expected.sequences_scores, strict=True):
            tokens = sequence[len(prompt) :].tolist()
            length = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
            assert list(ours.beam.tokens) == tokens[:length]
            assert ours.score == pytest.approx(float(score), abs=1e-4)
            assert ours.finish_reason == ("stop" if ours.beam.tokens[-1] in ends else "length")
        ended |= {ours.finish_reason for ours in found}
    assert "stop" in ended


def test_one_beam_is_greedy_decoding(model):
    engine = Engine(model, cache_bytes=2**21)
    for prompt in prompts(3):
        greedy = engine.generate([prompt], max_tokens=7, temperature=0.0)[0].tokens
        found = beam_search(engine, prompt, BeamOptions(1, early_stopping=True), Sampling(max_tokens=7))
        assert [list(one.beam.tokens) for one in found] == [greedy]


def test_a_beams_log_probabilities_are_those_of_its_tokens(model):
    engine = Engine(model, cache_bytes=2**21)
    prompt = prompts(2)[1]
    for one in beam_search(engine, prompt, BeamOptions(3), Sampling(max_tokens=6)):
        assert one.beam.logprob == pytest.approx(sum(entry.logprob for entry in one.beam.entries))
        assert [entry.token for entry in one.beam.entries] == list(one.beam.tokens)
        whole = engine.request([*prompt, *one.beam.tokens], Sampling(max_tokens=1, prompt_logprobs=0))
        engine.complete([whole])
        found = [entry.logprob for entry in whole.prompt_logprobs[len(prompt) :]]
        assert found == pytest.approx([entry.logprob for entry in one.beam.entries], abs=1e-5)


def test_beams_are_the_same_in_company_and_share_their_prefix(model):
    engine = Engine(model, cache_bytes=2**21, page_size=4)
    prompt = prompts(4)[3]
    alone = beam_search(engine, prompt, BeamOptions(4), Sampling(max_tokens=12))
    computed = engine.counts.prompt_tokens
    # Each step computes what its page does not hold yet, not the whole text again.
    assert computed < len(prompt) * 2
    small = Engine(model, cache_bytes=2**15, page_size=4, max_requests=3)
    others = [small.request(one, Sampling(max_tokens=20, seed=3, ignore_eos=True)) for one in prompts(4)]
    for request in others:
        small.add(request)
    crowded = beam_search(small, prompt, BeamOptions(4), Sampling(max_tokens=12))
    assert [(one.beam.tokens, one.score) for one in crowded] == [
        (one.beam.tokens, pytest.approx(one.score, abs=1e-5)) for one in alone
    ]


def test_bias_and_bad_words_steer_beams(model):
    engine = Engine(model, cache_bytes=2**21)
    prompt, options = prompts(3)[2], BeamOptions(3)
    best = beam_search(engine, prompt, options, Sampling(max_tokens=5))[0].beam.tokens
    for without in ({"bad_words": (best[:2],)}, {"logit_bias": {best[1]: float("-inf")}}):
        for one in beam_search(engine, prompt, options, Sampling(max_tokens=5, **without)):
            assert one.beam.tokens[:2] != best[:2]
    only = beam_search(engine, prompt, options, Sampling(max_tokens=4, allowed_tokens=frozenset([5, 9])))
    assert {token for one in only for token in one.beam.tokens} <= {5, 9}
    held = Sampling(max_tokens=6, min_tokens=4, stop_tokens=frozenset(best))
    assert all(len(one.beam.tokens) >= 4 for one in beam_search(engine, prompt, options, held))


def test_stop_strings_end_beams(tmp_path):
    engine = Engine(moesaic.load(talking_model(tmp_path / "tiny"), threads=1), cache_bytes=2**22)
    free = beam_search(engine, "The number", BeamOptions(3), Sampling(max_tokens=8, ignore_eos=True))
    stop = free[0].text.strip()[:2]
    stopped = beam_search(engine, "The number", BeamOptions(3), Sampling(max_tokens=8, ignore_eos=True, stop=(stop,)))
    assert all(stop not in one.text for one in stopped)
    assert {one.stop_reason for one in stopped if one.finish_reason == "stop"} <= {stop}
    texts = [one.text for one in beam_search(engine, "The number", BeamOptions(3), Sampling(max_tokens=8))]
    assert len(texts) == 3 and all("\ufffd" not in text for text in texts[:1])


def test_what_beams_cannot_do_is_refused(model):
    engine = Engine(model, cache_bytes=2**21)
    for width in (0, 101):
        with pytest.raises(UserError, match="beam search takes 1 to 100 beams"):
            BeamSearch(engine, engine.request([1, 2]), BeamOptions(width))
    with pytest.raises(UserError, match="prompt_logprobs"):
        BeamSearch(engine, engine.request([1, 2], Sampling(prompt_logprobs=1)), BeamOptions(2))
