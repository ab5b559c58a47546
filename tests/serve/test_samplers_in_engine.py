"""Every sampler gives the same text alone, in a batch, after preemptions, with a drafter and in another engine."""

from __future__ import annotations

from pathlib import Path

import pytest

import moesaic
from moesaic.serve.cluster.serialization import (
    deserialize_output,
    deserialize_request,
    serialize_output,
    serialize_request,
)
from moesaic.serve.core.bad_words import token_sequences
from moesaic.serve.core.drafters.model import DraftModel
from moesaic.serve.core.drafters.router import DraftRouter
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.dry import breakers_of
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.grammar import Grammar
from moesaic.serve.core.request import Request, Sampling
from tests.serve.made import talking_model
from tests.serve.tiny import page_bytes, serve_all

LLAMA_CPP = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
FREE = {"max_tokens": 24, "ignore_eos": True}
KINDS = {
    "dry": Sampling(seed=1, dry_multiplier=2.0, dry_allowed_length=1, dry_sequence_breakers=("e", "\n"), **FREE),
    "dry-greedy": Sampling(temperature=0.0, dry_multiplier=5.0, dry_allowed_length=1, dry_penalty_last_n=-1, **FREE),
    "xtc": Sampling(seed=2, xtc_probability=0.5, xtc_threshold=0.05, **FREE),
    "mirostat-1": Sampling(seed=3, mirostat=1, mirostat_tau=2.0, mirostat_eta=0.5, **FREE),
    "mirostat-2": Sampling(seed=4, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5, **FREE),
    "typical": Sampling(seed=5, typical_p=0.6, temperature=0.8, **FREE),
    "sigma": Sampling(seed=6, top_n_sigma=1.5, dynatemp_range=0.7, dynatemp_exponent=1.5, **FREE),
    "last": Sampling(seed=7, repetition_penalty=1.3, frequency_penalty=0.5, repeat_last_n=6, **FREE),
    "words": Sampling(temperature=0.0, bad_words=("D", "number"), **FREE),
    "allowed": Sampling(seed=8, allowed_tokens=frozenset(range(40, 60)), min_p=0.02, **FREE),
    "chain": Sampling(
        seed=9, samplers=LLAMA_CPP, temperature=1.4, top_k=90, top_p=0.95, min_p=0.02, typical_p=0.97, top_n_sigma=3.0,
        xtc_probability=0.3, xtc_threshold=0.05, dry_multiplier=0.8, repetition_penalty=1.1, **FREE,
    ),
    "grammar": Sampling(
        max_tokens=24, seed=10, mirostat=2, bad_words=("yes",), grammar=Grammar.regex("((yes|no|oui), ){6}")
    ),
}  # fmt: skip
PROMPTS = [f"{n} The number {n} is a number; number; number; as you like" for n in range(len(KINDS))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return talking_model(tmp_path_factory.mktemp("samplers") / "tiny")


@pytest.fixture(scope="module")
def model(directory):
    return moesaic.load(directory, threads=1)


def asked(engine: Engine) -> dict[str, Request]:
    return {name: engine.request(prompt, kind) for prompt, (name, kind) in zip(PROMPTS, KINDS.items(), strict=True)}


def written(requests: dict[str, Request]) -> dict[str, list[int]]:
    return {name: request.tokens[len(request.prompt) :] for name, request in requests.items()}


@pytest.fixture(scope="module")
def alone(model) -> dict[str, list[int]]:
    engine = Engine(model, cache_bytes=4 << 20, reuse_prefixes=False)
    requests = asked(engine)
    for request in requests.values():
        serve_all(engine, [request])
    found = written(requests)
    plain = engine.generate(PROMPTS, seed=1, **FREE)
    assert all(tokens != list(one.tokens) for tokens, one in zip(found.values(), plain, strict=True))
    return found


def test_together(model, alone):
    engine = Engine(model, cache_bytes=4 << 20)
    requests = asked(engine)
    serve_all(engine, requests.values())
    assert written(requests) == alone


def test_after_preemptions(model, alone):
    engine = Engine(model, cache_bytes=20 * page_bytes(model, 4), page_size=4)
    requests = asked(engine)
    serve_all(engine, requests.values())
    assert sum(request.preemptions for request in requests.values()) > 3
    assert written(requests) == alone


def test_with_weights_that_were_read_again(model, alone):
    engine = Engine(model, cache_bytes=4 << 20)
    requests = asked(engine)
    for request in requests.values():
        engine.add(request)
    for _ in range(8):
        engine.step()
    engine.weights_changed(recompute=True)
    serve_all(engine, [])
    assert written(requests) == alone


@pytest.mark.parametrize("kind", ["model", "suffix"])
def test_with_a_drafter(model, alone, directory, kind):
    drafter = DraftModel(str(directory)) if kind == "model" else Suffix()
    engine = Engine(model, cache_bytes=4 << 20, drafter=DraftRouter.over(drafter, always=True))
    for turn in range(2 if kind == "suffix" else 1):  # the second time it has seen all
        requests = asked(engine)
        serve_all(engine, requests.values())
        assert written(requests) == alone, turn
    assert engine.counts.accepted_tokens > 0


def test_a_draft_model_that_is_the_model_itself_is_nearly_always_right(model, directory):
    """It samples as the model will, by the same samplers."""
    for name in ("mirostat-2", "dry", "xtc", "chain", "words"):
        drafter = DraftRouter.over(DraftModel(str(directory)), always=True)
        engine = Engine(model, cache_bytes=4 << 20, drafter=drafter)
        request = engine.request(PROMPTS[0], KINDS[name])
        serve_all(engine, [request])
        assert engine.counts.drafted_tokens > 0
        assert engine.counts.accepted_tokens >= 0.9 * engine.counts.drafted_tokens, name


def test_moved_to_another_engine_again_and_again(model, alone):
    """As `serve/cluster` moves requests: with their tokens, and what comes with these."""
    front = Engine(model, cache_bytes=1 << 20)
    requests = asked(front)
    for request in requests.values():
        while request.finish_reason is None:
            engine = Engine(model, cache_bytes=1 << 20)
            worker = deserialize_request(engine, serialize_request(front, request))
            engine.add(worker)
            until = request.written + 7
            while request.written < until and request.finish_reason is None:
                for output in engine.step():
                    deserialize_output(request, serialize_output(output), 0.0)
    assert written(requests) == alone


def test_what_is_not_allowed_does_not_come(model, alone, directory):
    banned, tokens = token_sequences(model.tokenizer, ("D", "number"), model.config.vocab), alone["words"]
    for place in range(len(tokens)):  # in other tokens, the same letters may come
        assert all(tuple(tokens[place : place + len(word)]) != word for word in banned)
    assert set(alone["allowed"]) <= set(range(40, 60))
    greedy = Engine(model, cache_bytes=1 << 20).generate([PROMPTS[1]], temperature=0.0, **FREE)[0].tokens
    assert len(set(alone["dry-greedy"])) > len(set(greedy))  # it repeats itself less


def test_breakers_stand_in_every_token_that_can_begin_them(model):
    tokenizer = model.tokenizer
    texts = [tokenizer.decode([token], special=True) for token in range(len(tokenizer))]
    for breaker in ("\n", "e", "number is", '": "'):
        found = breakers_of(tokenizer, (breaker,))
        assert {token for token, text in enumerate(texts) if breaker in text} == {
            token for token, rests in found.items() if () in rests
        }
        for token, rests in found.items():
            for rest in rests:
                assert breaker in texts[token] + tokenizer.decode(rest)
        starts = tuple(breaker[:count] for count in range(1, len(breaker)))
        assert {token for token, text in enumerate(texts) if text.endswith(starts)} <= found.keys()
