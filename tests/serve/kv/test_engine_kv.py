"""Every policy in the engine: nothing pruned changes nothing, what is pruned frees pages, and neither neighbours nor
chunks nor preemption change what is said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moesaic.errors import UserError
from moesaic.kernels import native
from moesaic.methods import Method, build
from moesaic.model.transformer import Model
from moesaic.serve.core.drafters import Draft, Drafter
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kv import attention
from moesaic.serve.core.kv.store import store_for
from moesaic.serve.core.kv_policies import KVPolicy
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from tests.matrix import KV_POLICIES
from tests.serve.tiny import VOCABULARY, LayerClock, page_bytes, tiny_latent_model, tiny_model

SIZE = 4
PRUNING = {name: case.pruning for name, case in KV_POLICIES.items()}
WHOLE = {name: case.whole for name, case in KV_POLICIES.items()}


def made(name: str, options: dict[str, Any]) -> KVPolicy:
    return build(Method(name, options), KVPolicy, "test")


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(layers=2)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for length in (101, 64, 9, 120)]


@pytest.fixture(scope="module")
def alone(model: Model, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """What every policy says to each prompt when there is nothing else."""
    return {
        name: [answers(model, [prompt], made(name, options))[0] for prompt in prompts]
        for name, options in PRUNING.items()
    }


def answers(model: Model, prompts: list[list[int]], kv: KVPolicy | None, **options: Any) -> list[list[int]]:
    engine = Engine(model, page_size=SIZE, kv_policy=kv, **{"cache_bytes": 1 << 22, **options})
    found = engine.generate(prompts, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert engine.page_pool.in_use == 0 or kv is None
    return [answer.tokens for answer in found]


@pytest.mark.parametrize("name", WHOLE)
def test_nothing_pruned_says_the_same(model: Model, prompts: list[list[int]], name: str) -> None:
    assert answers(model, prompts, made(name, WHOLE[name])) == answers(model, prompts, None)


FORMS: list[tuple[str, dict[str, Any]]] = [
    *PRUNING.items(),
    *(("quantized", {**PRUNING["quantized"], "bits": bits}) for bits in (2, 8)),
    ("quantized", {**PRUNING["quantized"], "keys": "token", "channels": 8}),
]


@pytest.mark.skipif(native.kernels() is None, reason="no C compiler")
@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_native_code_says_what_the_library_says(
    model: Model, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]
) -> None:
    fused, calls = attention.CompactKernels.run_layers, []

    def counted(*given: Any) -> Any:
        calls.append((found := fused(*given)) is not None)
        return found

    def said() -> list[list[tuple[int, float]]]:
        engine = Engine(model, page_size=SIZE, kv_policy=made(name, options), cache_bytes=1 << 22)
        wishes = {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}
        found = engine.generate(prompts, **wishes)
        return [[(entry.token, entry.logprob) for entry in answer.logprobs] for answer in found]

    monkeypatch.setattr(attention.CompactKernels, "run_layers", counted)
    in_one_call = said()
    assert sum(calls) >= 19  # every step that only decodes
    monkeypatch.setattr(attention.CompactKernels, "run_layers", lambda *given: None)
    assert said() == in_one_call  # layer by layer, as beside a long prompt, to the bit
    monkeypatch.setattr(attention, "_native", lambda *given: None)
    for one, other in zip(in_one_call, said(), strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [logprob for _, logprob in one] == pytest.approx([logprob for _, logprob in other], abs=2e-3)


@pytest.mark.parametrize("name", PRUNING)
class TestEveryKVPolicy:
    def test_is_said_alike_alone_in_a_crowd_and_in_small_chunks(
        self, model: Model, prompts: list[list[int]], alone: dict[str, list[list[int]]], name: str
    ) -> None:
        policy = made(name, PRUNING[name])
        assert alone[name] != answers(model, prompts, None)  # or this test would test nothing
        assert answers(model, prompts, policy) == alone[name]
        assert answers(model, prompts, policy, policy=Chunked(tokens=7)) == alone[name]
        assert answers(model, prompts, policy, policy=FlowPrefill()) == alone[name]

    def test_is_said_alike_after_preemption(
        self, model: Model, prompts: list[list[int]], alone: dict[str, list[list[int]]], name: str
    ) -> None:
        policy = made(name, PRUNING[name])
        pages = -(-160 // SIZE)  # of the longest request alone
        engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=page_bytes(model, SIZE) * pages)
        wishes = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
        requests = [engine.request(prompt, wishes, priority=number) for number, prompt in enumerate(prompts)]
        for request in requests:
            engine.add(request)
        for count in range(300):
            if count in (12, 25) and (running := [one for one in requests if one.pages and not one.finish_reason]):
                engine.scheduler.preempt(running[-1])
            engine.step()
        assert engine.scheduler.preemptions >= 2
        assert [request.tokens[len(request.prompt) :] for request in requests] == alone[name]

    def test_gives_pages_back(self, model: Model, prompts: list[list[int]], name: str) -> None:
        held = {}
        for policy in (None, made(name, PRUNING[name])):
            engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
            request = engine.request(prompts[3], Sampling(max_tokens=20, temperature=0.0, ignore_eos=True))
            engine.add(request)
            most = 0
            while not request.written:
                engine.step()
                most = max(most, engine.page_pool.in_use)
            held[policy is None] = engine.page_pool.in_use
            assert engine.page_pool.in_use == len(request.pages)
            while request.finish_reason is None:
                engine.step()
            assert not request.pages and (policy is None or engine.page_pool.in_use == 0)
            assert sorted(engine.page_pool.free) == list(range(engine.cache.pages)) or policy is None
        assert held[True] == 120 // SIZE
        assert held[False] <= 0.6 * held[True]


def test_what_a_request_leaves_behind_does_not_matter(model: Model, prompts: list[list[int]]) -> None:
    """Rows that were never written may hold anything, and rows of others are not looked at."""
    policy = made("sinks", PRUNING["sinks"])
    expected = answers(model, prompts, policy)
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    for slabs in engine.cache.layers:
        for slab in slabs.values():
            slab.fill_(float("nan"))
    found = engine.generate(prompts, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert [answer.tokens for answer in found] == expected


def test_stopped_between_layers_and_dropped(model: Model, prompts: list[list[int]]) -> None:
    """A pass given up in its middle leaves nothing behind; new weights begin anew."""
    policy = made("snapkv", PRUNING["snapkv"])
    expected = answers(model, prompts[:1], policy)[0]
    clock = LayerClock(model)
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22, policy=FlowPrefill(), clock=clock)
    wishes = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    first, second = engine.request(prompts[0], wishes), engine.request(prompts[3], wishes)
    engine.add(first)
    engine.add(second)
    clock.at(0.15, lambda: engine.call(engine.weights_changed))
    clock.at(0.3, lambda: engine.call(lambda: engine.abort(second)))
    clock.run(engine)
    assert first.tokens[len(first.prompt) :] == expected
    assert second.finish_reason == "abort" and engine.page_pool.in_use == 0


def test_what_cannot_be_combined(model: Model, prompts: list[list[int]]) -> None:
    from moesaic.serve.core.branches import answer_in_branches
    from moesaic.serve.core.drafters.suffix import Suffix

    for name in ("h2o", "lethe", "fastgen"):
        with pytest.raises(UserError, match="scores the attention of generated tokens"):
            Engine(model, kv_policy=made(name, {}), drafter=Suffix(), cache_bytes=1 << 22)
        assert Engine(model, kv_policy=made(name, {"every": 0}), drafter=Suffix(), cache_bytes=1 << 22)
    streaming = Engine(model, kv_policy=made("sinks", {"window": 16}), cache_bytes=1 << 22)
    with pytest.raises(UserError, match="prompt_logprobs"):
        streaming.request(prompts[0], Sampling(prompt_logprobs=0))
    with pytest.raises(UserError, match="prompt_logprobs"):
        streaming.request(prompts[0], embed=True)
    assert streaming.request(prompts[2], Sampling(prompt_logprobs=0))  # too short to be pruned
    with pytest.raises(UserError):
        answer_in_branches(streaming, [1, 2, 3])
    for wrong in ({"share": 0.0}, {"share": 1.5}, {"least": 0}, {"shre": 0.5}):
        with pytest.raises(UserError):
            made("sinks", wrong)


@pytest.mark.parametrize("name", ["sinks", "snapkv", "kvmerger", "quantized", "minikv"])
def test_draft_tokens_change_nothing(model: Model, name: str) -> None:
    """Rejected ones leave no row behind, and no pruning comes earlier or later for the accepted ones."""

    class Echo(Drafter):
        """What the model will say, with an error in every third token: so some are accepted, and some are not."""

        def draft(self, requests: Sequence[Request], limit: int) -> list[Draft]:
            return [Draft.line(drafted[len(request.tokens) : len(request.tokens) + 5]) for request in requests]

    draw = random.Random(7)
    prompt = [draw.randrange(3, VOCABULARY) for _ in range(70)]
    policy, wishes = made(name, PRUNING[name]), Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    plain = engine.complete([engine.request(prompt, wishes)])[0]
    drafted = [(token + (place % 3 == 2)) % VOCABULARY for place, token in enumerate(prompt + plain.tokens)]
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    engine.drafter = Echo()
    found = engine.complete([engine.request(prompt, wishes)])[0]
    assert found.tokens == plain.tokens
    assert 10 <= engine.counts.accepted_tokens <= engine.counts.drafted_tokens - 5
    assert engine.counts.steps < 35 and engine.page_pool.in_use == 0


def test_prompt_logprobs_are_those_of_the_whole_prompt(model: Model, prompts: list[list[int]]) -> None:
    engine = Engine(model, page_size=SIZE, kv_policy=made("snapkv", PRUNING["snapkv"]), cache_bytes=1 << 22)
    found = engine.generate(prompts[:1], max_tokens=3, temperature=0.0, prompt_logprobs=0)[0].prompt_logprobs
    assert found is not None
    told = torch.tensor([entry.logprob for entry in found if entry is not None])
    torch.testing.assert_close(told, model.logprobs(prompts[:1])[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["snapkv", "kvmerger", "minikv"])
def test_who_prunes_once_takes_no_rounds(name: str) -> None:
    with pytest.raises(UserError, match="every must be 0"):
        made(name, {"every": 8})


def test_models_that_cannot_be_pruned(model: Model) -> None:
    with pytest.raises(UserError, match="latent attention"):
        Engine(tiny_latent_model(), kv_policy=made("sinks", {}), cache_bytes=1 << 22)
    with pytest.raises(UserError, match="float8"):
        Engine(model, kv_policy=made("sinks", {}), cache_bytes=1 << 22, cache_dtype="float8")


def test_prefixes_are_not_shared(model: Model, prompts: list[list[int]]) -> None:
    """What a request has retained of a prefix depends on what came after it."""
    engine = Engine(model, page_size=SIZE, kv_policy=made("snapkv", PRUNING["snapkv"]), cache_bytes=1 << 22)
    wishes = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    first = engine.generate(prompts[:1], **wishes)[0].tokens
    assert engine.generate(prompts[:1], **wishes)[0].tokens == first
    assert engine.counts.prompt_tokens == 2 * len(prompts[0]) and engine.page_pool.hits == 0


def test_mtp_layers_and_policies_do_not_share_pages(model: Model) -> None:
    from moesaic.serve.core.drafters.suffix import Suffix

    with_mtp: Any = SimpleNamespace(mtp=[object()])
    with pytest.raises(UserError, match="MTP layers"):
        store_for(with_mtp, model.new_cache(4, SIZE), made("snapkv", {}), Suffix())


def test_a_window_bounds_the_cache_while_the_prompt_is_read(model: Model, prompts: list[list[int]]) -> None:
    policy = made("sinks", {"sinks": 2, "window": 16, "every": 8})
    engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22)
    request = engine.request(prompts[3], Sampling(max_tokens=20, temperature=0.0, ignore_eos=True))
    engine.add(request)
    most = 0
    while request.finish_reason is None:
        engine.step()
        most = max(most, engine.page_pool.in_use)
    assert most <= -(-(2 + 16 + 8) // SIZE)


def test_memory_that_is_ever_written(model: Model) -> None:
    """On a CPU only pages that were written are in memory: of many requests under way at once, far fewer are."""
    touched = {}
    draw = random.Random(5)
    prompts = [[draw.randrange(3, VOCABULARY) for _ in range(100)] for _ in range(8)]
    wishes = Sampling(max_tokens=60, temperature=0.0, ignore_eos=True)
    for name in ("", "snapkv", "minikv"):
        policy = made(name, {"share": 0.25, "least": 8, "window": 8}) if name else None
        engine = Engine(model, page_size=SIZE, kv_policy=policy, cache_bytes=1 << 22, policy=Chunked(tokens=60))
        for slabs in engine.cache.layers:
            slabs["keys"].fill_(float("nan"))
        requests = [engine.request(prompt, wishes) for prompt in prompts]
        for request in requests:
            engine.add(request)
        while not all(request.written for request in requests):
            engine.step()
        assert all(request.pages for request in requests)  # all are there at once
        touched[name] = int((~engine.cache.whole["keys"].isnan()).flatten(2).any(-1).any(0).sum())
    assert touched[""] >= 8 * 100 // SIZE
    assert touched["snapkv"] < 0.6 * touched[""] and touched["minikv"] < 0.6 * touched[""]
