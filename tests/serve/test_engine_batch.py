"""What a request gets does not depend on who else is there: 200 random requests alone and together, and who owns pages.

Alone means: one at a time, nothing shared. Together means: all at once, in every way the engine has of sharing its time
and memory between them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from moesaic.model.layout import PagedCache
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.page_pool import Node, PagePool
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.core.scheduling_policies.flow import FlowPrefill
from tests.serve.tiny import VOCABULARY, LayerClock, page_bytes, tiny_model

REQUESTS = 200


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    sampling: Sampling
    salt: str


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def crowd() -> list[Asked]:
    """Prompts of 1 to 60 tokens, many of which begin alike; half of the answers greedy, half drawn."""
    rng = random.Random(7)
    starts = [[rng.randrange(VOCABULARY) for _ in range(40)] for _ in range(5)]
    asked = []
    for number in range(REQUESTS):
        shared = rng.choice(starts)[: rng.randint(1, 40)] if rng.random() < 0.6 else []
        prompt = shared + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
        sampling = Sampling(
            max_tokens=rng.randint(1, 9),
            temperature=float(number % 2),
            seed=rng.getrandbits(40),
            top_p=rng.choice([1.0, 0.9]),
            ignore_eos=True,
        )
        asked.append(Asked(prompt, sampling, rng.choice(["", "", "other"])))
    return asked


@pytest.fixture(scope="module")
def alone(model, crowd) -> list[list[int]]:
    engine = Engine(model, reuse_prefixes=False)
    answers = []
    for asked in crowd:
        request = engine.request(asked.prompt, asked.sampling)
        engine.add(request)
        while request.finish_reason is None:
            engine.step()
        answers.append(request.tokens[len(asked.prompt) :])
    assert len({tuple(answer) for answer in answers}) > REQUESTS / 2  # they are not all the same
    return answers


def serve_all(engine: Engine, crowd: list[Asked], seed: int, disturbed: bool) -> list[Request]:
    """Requests come while others run, some go away, and the engine is held up now and then."""
    rng = random.Random(seed)
    bytes_before = cache_bytes(engine)
    coming = []
    for asked in crowd:
        due = rng.choice([None, rng.uniform(0, 2.0)])
        request = engine.request(asked.prompt, asked.sampling, salt=asked.salt, priority=rng.choice([0, 0, 1]))
        request.deadline = request.arrived + due if due is not None else None
        coming.append(request)
    requests, steps = list(coming), 0
    layers = 0
    leaving: list[tuple[int, Request]] = []  # after how many layers who goes away

    def come() -> None:
        request = coming.pop(0)
        engine.submit(request)
        if disturbed and rng.random() < 0.25:
            leaving.append((layers + rng.randint(0, 30), request))
            leaving.sort(key=lambda entry: entry[0])

    def between_layers(*_) -> None:
        nonlocal layers
        layers += 1
        if coming and layers % 2 == 0:
            come()
        while leaving and leaving[0][0] <= layers:
            victim = leaving.pop(0)[1]
            engine.call(partial(engine.abort, victim))
        if disturbed and rng.random() < 0.02:
            engine.call(engine.pause)

    hooks = [layer.register_forward_hook(between_layers) for layer in engine.model.layers]
    while coming or engine.working or engine.paused:
        if coming and not engine.working:
            come()
        engine.step()
        assert 0 <= engine.page_pool.available <= engine.cache.pages
        if engine.paused:
            assert engine.step() == []
            engine.resume()
        steps += 1
        assert steps < 50_000
    for hook in hooks:
        hook.remove()
    assert cache_bytes(engine) == bytes_before
    return requests


def cache_bytes(engine: Engine) -> int:
    return sum(slab.nbytes for layer in engine.cache.layers for slab in layer.values())


WAYS = {
    "chunked": dict(policy=lambda: Chunked(tokens=64)),
    "chunked-no-reuse-disturbed": dict(policy=lambda: Chunked(tokens=17), reuse_prefixes=False),
    "chunked-tiny-cache": dict(policy=lambda: Chunked(tokens=40), pages=24),
    "flow-disturbed": dict(policy=lambda: FlowPrefill(itl=0.01)),
    "flow-no-reuse": dict(policy=lambda: FlowPrefill(itl=0.0, batch=64), reuse_prefixes=False, pages=40),
    "flow-tiny-cache": dict(policy=lambda: FlowPrefill(itl=0.005, batch=40), pages=24),
    "flow-tiny-cache-disturbed": dict(policy=lambda: FlowPrefill(itl=0.005, batch=40), pages=24),
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_alone_and_together(model, crowd, alone, way):
    options, disturbed = dict(WAYS[way]), "disturbed" in way
    pages, policy = options.pop("pages", None), options.pop("policy")()
    budget = pages * page_bytes(model, 8) if pages else None
    # Time that passes only when layers are computed: what Flow does depends on it, and not on how busy the machine is.
    clock = LayerClock(model, base=2e-4, per_token=1e-5)
    engine = Engine(model, policy=policy, page_size=8, cache_bytes=budget, clock=clock, **options)
    assert budget is None or cache_bytes(engine) <= budget
    requests = serve_all(engine, crowd, seed=1, disturbed=disturbed)
    clock.remove()

    finished = 0
    for asked, request, expected in zip(crowd, requests, alone, strict=True):
        answer = request.tokens[len(asked.prompt) :]
        if request.finish_reason == "length":
            assert answer == expected, f"request {request.number}"
            finished += 1
        else:
            assert request.finish_reason == "abort" and answer == expected[: len(answer)]
    assert finished == REQUESTS if not disturbed else REQUESTS / 2 < finished < REQUESTS
    assert engine.page_pool.in_use == 0
    assert not engine.scheduler.requests and not engine.scheduler.stopped and not engine.inbox
    if "tiny" in way and not disturbed:
        assert engine.scheduler.preemptions > 0
    if "no-reuse" in way:
        assert engine.page_pool.hits == 0 and len(engine.page_pool.free) == engine.cache.pages
    else:
        assert engine.page_pool.hits > 0


# Sharing


def words(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def test_a_prompt_that_waits_for_pages_is_counted_as_looked_up_once(model):
    engine = Engine(model, page_size=4, cache_bytes=8 * page_bytes(model, 4))
    first = engine.request(words(20, 0), Sampling(max_tokens=12, ignore_eos=True))
    second = engine.request([*first.prompt[:8], *words(14, 1)], Sampling(max_tokens=3, ignore_eos=True))
    for request in (first, second):
        engine.add(request)
    while second.finish_reason is None:
        engine.step()
    assert first.finish_reason == "length" and engine.scheduler.preemptions == 0
    assert engine.page_pool.queries == 19 + 21
    assert engine.page_pool.hits == second.cached == 8


def finish(engine: Engine, request: Request) -> list[int]:
    engine.add(request)
    while request.finish_reason is None:
        engine.step()
    return request.tokens[len(request.prompt) :]


GREEDY = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)


def test_salts_do_not_share(model):
    engine = Engine(model, page_size=8)
    prompt = words(50, seed=1)
    first, same, other = [engine.request(prompt, GREEDY, salt=salt) for salt in ("a", "a", "b")]
    answers = [finish(engine, request) for request in (first, same, other)]
    assert answers[0] == answers[1] == answers[2]
    assert (first.cached, same.cached, other.cached) == (0, 49, 0)


def test_prompts_that_part_within_a_page_copy_it_and_leave_the_other_whole(model):
    prompt, half = words(20, seed=2), words(20, seed=2)[:13] + words(9, seed=3)
    apart = Engine(model, reuse_prefixes=False)
    expected = [finish(apart, apart.request(tokens, GREEDY)) for tokens in (prompt, half, prompt)]
    engine = Engine(model, page_size=8)
    requests = [engine.request(tokens, GREEDY) for tokens in (prompt, half, prompt)]
    assert [finish(engine, request) for request in requests] == expected
    assert [request.cached for request in requests] == [0, 13, 19]


def test_a_request_copies_from_one_that_is_still_writing(model):
    prompt = words(13, seed=4)
    engine = Engine(model, page_size=8)
    expected = finish(engine, engine.request(prompt, GREEDY, salt="apart"))
    writing = engine.request(prompt, Sampling(max_tokens=30, temperature=0.0, ignore_eos=True))
    engine.add(writing)
    while writing.written < 2:
        engine.step()
    late = engine.request(prompt, GREEDY)
    assert finish(engine, late) == expected
    assert late.cached == 12 and writing.finish_reason is None
    assert set(late.pages).isdisjoint(writing.pages)


@pytest.mark.parametrize("writing", [True, False], ids=["still writing", "done"])
def test_what_was_written_is_not_shared_where_only_prompts_are(model, writing):
    engine = Engine(model, page_size=8)
    engine.page_pool.prompts_only = True
    first = engine.request(words(13, seed=4), Sampling(max_tokens=30, temperature=0.0, ignore_eos=True))
    engine.add(first)
    while first.written < 12 if writing else engine.working:
        engine.step()
    longer = engine.request(first.tokens[:24] + words(3, seed=5), GREEDY)
    finish(engine, longer)
    assert longer.cached == 13


def test_answers_to_one_prompt_read_it_once(model):
    engine = Engine(model, page_size=8, policy=Chunked(tokens=512))
    answers = engine.generate([words(64, seed=5)], n=6, max_tokens=5, temperature=1.0, seed=3)
    # Five of them compute no more than the page that holds the last token.
    assert engine.counts.prompt_tokens <= 64 + 5 * 8
    assert len({tuple(answer.tokens) for answer in answers}) > 1


def test_the_prompts_log_probabilities_stay_when_its_pages_are_taken(model):
    engine = Engine(model, page_size=8)
    request = engine.request(words(20, seed=6), Sampling(max_tokens=4, temperature=0.0, prompt_logprobs=1))
    engine.add(request)
    while not request.written:  # a scored prompt takes several steps
        engine.step()
    told = list(request.prompt_logprobs)
    engine.scheduler.preempt(request)
    assert request.prompt_logprobs == told and len(told) == 20  # somebody may just be reading them
    finish(engine, request)
    assert request.prompt_logprobs == told and request.written == 4


def test_new_weights_share_nothing_with_the_old(model):
    engine = Engine(model, page_size=8)
    prompt = words(50, seed=6)
    for _ in range(2):
        finish(engine, engine.request(prompt, GREEDY))
    engine.weights_changed()
    assert len(engine.page_pool.free) == engine.cache.pages
    after = engine.request(prompt, GREEDY)
    finish(engine, after)
    assert after.cached == 0 and after.versions == [1] * 4


# Who owns which page

PAGES, SIZE = 10, 4


def contents(root: object, tokens: list[int]) -> int:
    """What the last row of these tokens holds: a number that all tokens before it, and the root, decide."""
    return hash((root, tuple(tokens))) % 2**50


class BlocksMachine(RuleBasedStateMachine):
    """Requests that come, compute, share and go, against what their rows should hold."""

    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedCache([{"keys": (1,)}], PAGES, SIZE, torch.float64)
        self.page_pool = PagePool(self.cache)
        self.live: list[Request] = []
        self.writers: dict[int, object] = {}  # the root a request computes under, which a flush does not change

    @rule(target=requests, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), salt=st.sampled_from("ab"))
    def come(self, tokens: list[int], salt: str) -> Request:
        request = Request(tokens)
        request.root = salt
        free = self.page_pool.available
        found = self.page_pool.cached_prefix(request)
        self.page_pool.match_prefix(request, self.live)
        assert found // SIZE * SIZE <= request.computed
        assert request.computed < len(tokens)
        assert len(request.pages) == -(-request.computed // SIZE)
        assert self.page_pool.available <= free
        self.live.append(request)
        self.writers[request.number] = salt
        return request

    @rule(request=requests, count=st.integers(1, 9))
    def compute(self, request: Request, count: int) -> None:
        if request not in self.live or not request.pending:
            return
        count = min(count, request.pending)
        pages, free = list(request.pages), self.page_pool.available
        if not self.page_pool.grow(request, request.computed + count):
            assert request.pages == pages and self.page_pool.available == free
            assert -(-(request.computed + count) // SIZE) - len(pages) > free
            return
        for place in range(request.computed, request.computed + count):
            row = contents(self.writers[request.number], request.tokens[: place + 1])
            self.cache.layers[0]["keys"][request.pages[place // SIZE], place % SIZE] = row
        request.computed += count
        self.page_pool.publish(request)

    @rule(request=requests, token=st.integers(0, 1))
    def write(self, request: Request, token: int) -> None:
        if request in self.live and not request.pending and len(request.tokens) < PAGES * SIZE:
            request.tokens.append(token)

    @rule(request=consumes(requests))
    def go(self, request: Request) -> None:
        if request in self.live:
            self.page_pool.release(request)
            self.live.remove(request)
            assert not request.pages and not request.nodes and request.computed == 0

    @rule()
    def change_weights(self) -> None:
        self.page_pool.flush()
        for request in self.live:
            request.root = None

    @invariant()
    def every_row_holds_what_was_computed(self) -> None:
        keys = self.cache.layers[0]["keys"]
        for request in self.live:
            for place in range(request.computed):
                found = int(keys[request.pages[place // SIZE], place % SIZE])
                assert found == contents(self.writers[request.number], request.tokens[: place + 1])

    @invariant()
    def every_page_has_one_owner(self) -> None:
        nodes = self.nodes()
        held = {id(node): node for request in self.live for node in request.nodes}
        private = [page for request in self.live for page in request.pages[len(request.nodes) :]]
        published = {id(node): node.page for node in nodes} | {key: node.page for key, node in held.items()}
        owners = Counter([*self.page_pool.free, *private, *published.values()])
        assert set(owners) == set(range(PAGES)) and max(owners.values()) == 1

    @invariant()
    def users_are_counted(self) -> None:
        users = Counter(id(node) for request in self.live for node in request.nodes)
        nodes = self.nodes()
        assert all(node.users == users[id(node)] for node in nodes)
        assert self.page_pool.idle == sum(node.users == 0 for node in nodes)
        for request in self.live:
            assert [node.page for node in request.nodes] == request.pages[: len(request.nodes)]

    def nodes(self) -> list[Node]:
        found = [node for children in self.page_pool.roots.values() for node in children.values()]
        for node in found:
            found.extend(node.children.values())
        return found

    def teardown(self) -> None:
        for request in self.live:
            self.page_pool.release(request)
        assert self.page_pool.in_use == 0
        # What nobody uses can all be had.
        greedy = Request([0])
        greedy.root = "c"
        assert self.page_pool.grow(greedy, PAGES * SIZE)
        assert sorted(greedy.pages) == list(range(PAGES))


BlocksMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = BlocksMachine.TestCase
