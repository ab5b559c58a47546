"""Pages are found by name and held by leases, which end: in time, by name, or because pages are needed."""

from __future__ import annotations

from moesaic.model.layout import PagedCache
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.page_pool import PagePool
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.scheduling_policies.chunked import Chunked
from moesaic.serve.pages.names import PageNames
from tests.serve.tiny import page_bytes, serve_all, tiny_model

ROOT = ("", None, 0)


def pool_of(pages: int, size: int = 4) -> PagePool:
    import torch

    pool = PagePool(PagedCache([{"keys": (1, 2)}], pages, size, torch.float32))
    pool.names = PageNames("w")
    return pool


def fill(pool: PagePool, tokens: list[int], lease: tuple[str, float] | None = None) -> Request:
    request = Request(tokens)
    request.root = ROOT
    pool.match_prefix(request)
    assert pool.grow(request, len(tokens))
    request.computed = len(tokens)
    pool.publish(request)
    pool.release(request, lease)
    return request


def names_of(pool: PagePool, tokens: list[int]) -> list[bytes]:
    assert pool.names is not None
    return list(pool.names.of_prompt(ROOT, tokens, pool.size))


def test_a_page_is_found_by_its_name_until_it_is_evicted() -> None:
    pool = pool_of(4)
    fill(pool, list(range(12)))
    names = names_of(pool, list(range(12)))
    assert [pool.nodes[name].tokens for name in names] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    fill(pool, list(range(50, 58)))  # takes the free page, and that of the last
    assert [name in pool.nodes for name in names] == [True, True, False]
    pool.flush()
    assert not pool.nodes and pool.in_use == 0


def test_leased_pages_stay_and_are_in_use_until_the_lease_ends() -> None:
    pool = pool_of(8)
    fill(pool, list(range(10)), lease=("a", 5.0))
    assert pool.in_use == 3 and len(pool.leases["a"].nodes) == 3  # the last page, partly filled, too
    pool.end_leases(4.9)
    assert pool.in_use == 3
    pool.end_leases(5.0)
    assert pool.in_use == 0 and not pool.leases and pool.available == 8
    fill(pool, list(range(10)), lease=("b", 9.0))
    assert pool.end_lease("b") and not pool.end_lease("b") and pool.in_use == 0


def test_a_lease_of_a_late_page_holds_those_before_it() -> None:
    pool = pool_of(6)
    fill(pool, list(range(16)))
    late = pool.nodes[names_of(pool, list(range(16)))[2]]
    pool.hold("x", [late], 1.0)
    assert pool.in_use == 3
    for start in range(100, 300, 20):  # all others are evicted, again and again
        fill(pool, list(range(start, start + 12)))
    assert [name in pool.nodes for name in names_of(pool, list(range(16)))] == [True, True, True, False]
    pool.hold("x", [late], 2.0)  # once more: the one before it ends
    assert pool.in_use == 3 and pool.end_lease("x") and pool.in_use == 0


def test_leases_give_way_oldest_first() -> None:
    pool = pool_of(6)
    fill(pool, list(range(8)), lease=("old", 9.0))
    fill(pool, list(range(20, 28)), lease=("new", 9.0))
    assert (
        pool.available == 2 and pool.make_room(Request([1]), 4) and list(pool.leases) == ["new"] and pool.revoked == 1
    )
    assert not pool.make_room(Request([1]), 7) and not pool.leases


def test_leases_survive_a_change_of_weights_without_a_leak() -> None:
    pool = pool_of(6)
    fill(pool, list(range(8)), lease=("a", 9.0))
    pool.flush()
    assert pool.in_use == 2
    assert pool.end_lease("a") and pool.in_use == 0 and sorted(pool.free) == list(range(6))


def test_a_request_that_is_handed_on_leaves_its_pages_under_a_lease_and_an_aborted_one_does_not() -> None:
    model = tiny_model()
    now = [0.0]
    engine = Engine(model, cache_bytes=20 * page_bytes(model, 4), page_size=4, clock=lambda: now[0], policy=Chunked(4))
    engine.page_pool.names = PageNames("w")
    prompt = list(range(1, 12))
    request = engine.request(prompt, lease=("mine", 3.0))
    serve_all(engine, [request])
    assert request.finish_reason == "handed" and request.written == 1 and engine.page_pool.in_use == 3
    last = engine.request([50, *prompt], Sampling(max_tokens=1), lease=("last", 3.0))  # it has all it wants
    serve_all(engine, [last])
    assert last.finish_reason == "length" and engine.page_pool.in_use == 3
    gone = engine.request([60, *prompt], lease=("gone", 3.0))
    engine.add(gone)
    engine.step()
    engine.abort(gone)
    assert list(engine.page_pool.leases) == ["mine"]
    now[0] = 3.0
    engine.page_pool.end_leases(now[0])
    assert engine.page_pool.in_use == 0
