"""Prefix caching of models whose layers keep a state of each sequence: less is computed, and the bits are the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import moesaic
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.kept_states import StatefulPagePool
from moesaic.serve.core.request import Completion
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.stats import EngineStats
from tests.model import oracle

SIZE, WRITTEN = 4, 6


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "model"
    oracle.save("qwen3_next", path, max_position_embeddings=160)
    return path


@pytest.fixture(scope="module", params=["invariant", "fast"])
def model(request, stored: Path) -> Model:
    return moesaic.load(stored, threads=1, mode=request.param)


def text(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 97) for _ in range(length)]


def said(found: Completion) -> tuple[list[int], list[float]]:
    return found.tokens, [entry.logprob for entry in found.logprobs]


def answers(engine: Engine, prompts: list[list[int]], written: int = WRITTEN) -> list[Completion]:
    return engine.generate(prompts, max_tokens=written, seed=3, logprobs=1, ignore_eos=True)


def plain(model: Model, prompt: list[int], written: int = WRITTEN) -> tuple[list[int], list[float]]:
    return said(answers(Engine(model, page_size=SIZE, reuse_prefixes=False), [prompt], written)[0])


def pool_of(engine: Engine) -> StatefulPagePool:
    """Of an engine at rest: no place is lost, and none there twice."""
    pool = engine.page_pool
    assert isinstance(pool, StatefulPagePool) and not pool.holders
    assert sorted([*pool.free_states, *pool.kept.values()]) == list(range(pool.states.places))
    assert pool.available == pool.pages
    return pool


def test_what_was_said_before_is_not_computed_again(model: Model) -> None:
    engine, prompt = Engine(model, page_size=SIZE), text(0, 41)
    first = answers(engine, [prompt])[0]
    again = answers(engine, [prompt])[0]
    assert (first.cached_tokens, again.cached_tokens) == (0, 40)  # the last token gives the logits
    assert said(again) == said(first) == plain(model, prompt)
    longer = prompt + first.tokens + text(1, 9)
    on = answers(engine, [longer])[0]
    assert on.cached_tokens == 41 + WRITTEN - 1  # the last token written was read by nobody
    assert said(on) == plain(model, longer)
    pool_of(engine)
    assert EngineStats.of(engine).prompt_tokens == 41 + 1 + 10


def test_where_texts_part_is_found_out_by_the_second(model: Model) -> None:
    engine, shared = Engine(model, page_size=SIZE), text(0, 43)
    prompts = [shared + text(seed, 21) for seed in (1, 2, 3)]
    found = [answers(engine, [prompt])[0] for prompt in prompts]
    assert [one.cached_tokens for one in found] == [0, 0, 40]
    assert [said(one) for one in found] == [plain(model, prompt) for prompt in prompts]


@pytest.mark.parametrize("budget", [512, 16])
def test_those_that_come_together_compute_what_they_share_once(model: Model, budget: int) -> None:
    engine, shared = Engine(model, page_size=SIZE, policy=Chunked(tokens=budget)), text(0, 43)
    prompts = [shared + text(1, 21), shared + text(2, 30), shared + text(1, 21), text(4, 20)]
    found = answers(engine, prompts)
    assert [one.cached_tokens for one in found] == [0, 40, 60, 0]
    assert [said(one) for one in found] == [plain(model, prompt) for prompt in prompts]
    pool_of(engine)


@pytest.mark.parametrize("seed", range(3))
def test_any_mixture_with_little_room(model: Model, seed: int) -> None:
    """Requests that share beginnings, are preempted, evict each other's pages and states, and are given up."""
    draw = random.Random(seed)
    shared = [text(n, draw.randrange(5, 40)) for n in range(3)]
    prompts = [draw.choice(shared) + text(10 + n % 5, draw.randrange(1, 30)) for n in range(14)]
    engine = Engine(
        model,
        page_size=SIZE,
        cache_bytes=10 * model.state_bytes,
        policy=Chunked(tokens=draw.choice([5, 24, 512])),
        max_requests=draw.choice([2, 4]),
    )
    wanted = [plain(model, prompt) for prompt in prompts]
    for _ in range(2):
        given_up = engine.request(prompts[0] + text(77, 30))
        engine.submit(given_up)
        engine.step()
        engine.abort(given_up)
        assert [said(one) for one in answers(engine, prompts)] == wanted
        pool_of(engine)
    assert engine.page_pool.hits > 0


def test_the_least_recently_used_gives_way(model: Model) -> None:
    engine = Engine(model, page_size=SIZE, cache_bytes=200 * model.state_bytes, max_requests=1)
    pool = pool_of(engine)
    del pool.free_states[6:]
    pool.states.places = 6
    prompts = [text(seed, 21) for seed in range(3)]
    for prompt in prompts:
        answers(engine, [prompt])  # keeps two: of the prompt, and of all
    assert len(pool.kept) == 6
    assert [answers(engine, [prompt])[0].cached_tokens for prompt in reversed(prompts)] == [20, 20, 0]


def test_a_state_in_the_middle_of_a_step_is_not_kept(model: Model) -> None:
    """Some layers may have gone on with it already, as when a pass is given up between layers."""
    for begun in (False, True):
        engine = Engine(model, page_size=SIZE, policy=Chunked(tokens=16))
        request = engine.request(text(0, 41))
        engine.submit(request)
        engine.step()
        if begun:
            engine.scheduler.schedule(0.0)
        engine.scheduler.remove(request)
        assert [len(node.tokens) for node in pool_of(engine).kept] == ([] if begun else [SIZE])


def test_nothing_is_kept_of_other_weights(stored: Path) -> None:
    model = moesaic.load(stored, threads=1)
    engine, prompt = Engine(model, page_size=SIZE), text(0, 41)
    before = answers(engine, [prompt])[0]
    with torch.no_grad():
        model.layers[0].attention.out.weight.mul_(1.5)
    engine.weights_changed()
    assert not pool_of(engine).kept
    after = answers(engine, [prompt])[0]
    assert after.cached_tokens == 0 and said(after) != said(before)
    assert said(after) == plain(model, prompt)


def test_without_reuse_nothing_is_kept(model: Model) -> None:
    engine, prompt = Engine(model, page_size=SIZE, reuse_prefixes=False), text(0, 41)
    assert [answers(engine, [prompt])[0].cached_tokens for _ in range(2)] == [0, 0]
    assert not pool_of(engine).kept
