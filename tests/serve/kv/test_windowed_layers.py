"""Layers with a sliding window beside layers that a policy prunes: what they retain is what they see, whatever a policy
does with the others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.methods import Method, build
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv import attention
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from tests.matrix import KV_POLICIES
from tests.serve.tiny import VOCABULARY, tiny_model

SIZE, WINDOW = 4, 24
PRUNING = {name: case.pruning for name, case in KV_POLICIES.items()}


def made(name: str, options: dict[str, Any]) -> KVPolicy:
    return build(Method(name, options), KVPolicy, "test")


def windowed(plain: Model, sizes: Sequence[int | None]) -> Model:
    """The same weights, with windows."""
    layers = tuple(replace(layer, window=size) for layer, size in zip(plain.config.layers, sizes, strict=True))
    model = Model(replace(plain.config, layers=layers))
    model.load_state_dict(plain.state_dict())
    return model.eval()


@pytest.fixture(scope="module")
def plain() -> Model:
    return tiny_model(layers=4)


@pytest.fixture(scope="module")
def model(plain: Model) -> Model:
    return windowed(plain, [WINDOW, None, WINDOW + 5, None])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (101, 20, 64)]


def said(model: Model, prompts: list[list[int]], kv: KVPolicy | None, **options: Any) -> list[list[tuple[int, float]]]:
    engine = Engine(model, page_size=SIZE, kv_policy=kv, **{"cache_bytes": 1 << 22, **options})
    found = engine.generate(prompts, max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
    return [[(entry.token, entry.logprob) for entry in answer.logprobs or []] for answer in found]


def tokens(answers: list[list[tuple[int, float]]]) -> list[list[int]]:
    return [[token for token, _ in answer] for answer in answers]


@pytest.mark.parametrize("name", KV_POLICIES)
def test_where_a_policy_drops_nothing_the_text_is_that_of_the_whole_cache(
    plain: Model, model: Model, prompts: list[list[int]], name: str
) -> None:
    whole = said(model, prompts, None)
    assert tokens(whole) != tokens(said(plain, prompts, None))  # or windows would change nothing here
    for options in ({}, {"policy": Chunked(tokens=7)}):
        found = said(model, prompts, made(name, KV_POLICIES[name].whole), **options)
        assert tokens(found) == tokens(whole)
        for own, other in zip(found, whole, strict=True):
            assert [logprob for _, logprob in own] == pytest.approx([logprob for _, logprob in other], abs=2e-3)


@pytest.mark.parametrize("name", PRUNING)
def test_the_same_is_said_alone_in_a_crowd_in_chunks_and_by_the_library(
    model: Model, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    policy = made(name, PRUNING[name])
    crowd = said(model, prompts, policy)
    assert tokens(crowd) != tokens(said(model, prompts, None))
    assert [tokens(said(model, [prompt], policy))[0] for prompt in prompts] == tokens(crowd)
    assert tokens(said(model, prompts, policy, policy=Chunked(tokens=7))) == tokens(crowd)
    if native.kernels() is not None:
        monkeypatch.setattr(attention.CompactKernels, "run_layers", lambda *given: None)
        assert said(model, prompts, policy) == crowd  # to the bit
        monkeypatch.setattr(attention, "_native", lambda *given: None)
        assert tokens(said(model, prompts, policy)) == tokens(crowd)


@pytest.mark.parametrize("name", ["snapkv", "quantized", "minikv"])
def test_draft_tokens_see_windows_of_their_own(model: Model, prompts: list[list[int]], name: str) -> None:
    class Echo(Drafter):
        """What the model will say, with an error in every third token."""

        def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
            return [Draft.line(drafted[len(request.tokens) : len(request.tokens) + 5]) for request in requests]

    policy, wishes = made(name, PRUNING[name]), Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    alone = engine.complete([engine.request(prompts[0], wishes)])[0]
    drafted = [(token + (place % 3 == 2)) % VOCABULARY for place, token in enumerate(prompts[0] + alone.tokens)]
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    engine.drafter = Echo()
    assert engine.complete([engine.request(prompts[0], wishes)])[0].tokens == alone.tokens
    assert engine.counts.accepted_tokens >= 10


def test_a_windows_rows_are_no_part_of_the_budget(model: Model, prompts: list[list[int]]) -> None:
    share, length = 0.5, len(prompts[0])
    policy = made("snapkv", {"share": share, "least": 8, "window": 8})
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    request = engine.request(prompts[0], Sampling(max_tokens=4, temperature=0.0, ignore_eos=True))
    engine.add(request)
    while not request.written:
        engine.step()
    compact = request.compact
    assert compact is not None
    budget = -(-length // 2)
    assert compact.counts_LN.tolist() == [[WINDOW - 1] * 2, [budget] * 2, [WINDOW + 4] * 2, [budget] * 2]
    assert compact.positions_LNM[0, 0, -(WINDOW - 1) :].tolist() == list(range(length - WINDOW + 1, length))


def test_a_model_of_windows_alone_and_one_of_chunks_are_refused(plain: Model, model: Model) -> None:
    with pytest.raises(UserError, match="every layer"):
        Engine(windowed(plain, [WINDOW] * 4), kv_policy=made("sinks", {}), cache_bytes=1 << 22)
    layers = (replace(model.config.layers[0], chunked=True), *model.config.layers[1:])
    with pytest.raises(UserError, match="chunks"):
        Engine(Model(replace(model.config, layers=layers)), kv_policy=made("sinks", {}), cache_bytes=1 << 22)
