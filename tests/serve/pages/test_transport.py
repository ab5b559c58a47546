"""Pages asked for by name arrive as they are, by either transport; what breaks is noticed and leaves nothing pinned."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moesaic.errors import UserError
from moesaic.serve.core.engine import Engine
from moesaic.serve.pages.channel import Channel, ChannelBroken, Door, knock
from moesaic.serve.pages.outside import TierOptions
from moesaic.serve.pages.page_bytes import PageBytes
from moesaic.serve.pages.remote import Origin, Rank, RemotePages
from moesaic.serve.pages.server import PageServer, page_server
from moesaic.serve.pages.transport import nixl_package, transport
from tests.serve.tiny import page_bytes, tiny_latent_model, tiny_model
from tests.waiting import PATIENCE, until

PROMPT = list(range(1, 40))
NIXL = pytest.mark.skipif(nixl_package() is None, reason="nixl is not installed")


def patience() -> float:
    return PATIENCE


@contextmanager
def served(kind: str = "distributed", latent: bool = False) -> Iterator[tuple[Engine, PageServer, list[bytes]]]:
    """An engine that has computed a prompt, on a thread; the names of its pages."""
    model = tiny_latent_model() if latent else tiny_model()
    tiers = TierOptions(travel=True, transport=kind)
    engine = Engine(model, cache_bytes=40 * page_bytes(model, 4), page_size=4, tiers=tiers)
    engine.generate([PROMPT], max_tokens=1)
    server = page_server(engine)
    assert server is not None and engine.page_pool.names is not None
    ended = threading.Event()

    def run() -> None:
        while not ended.wait(0.001):
            engine.read_inbox()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield engine, server, list(engine.page_pool.names.of_prompt(("", None, 0), PROMPT, 4))
    finally:
        server.close()
        ended.set()
        thread.join()


@pytest.mark.parametrize("kind", ["distributed", pytest.param("nixl", marks=NIXL)])
@pytest.mark.parametrize("latent", [False, True])
def test_pages_by_name(kind: str, latent: bool) -> None:
    with served(kind, latent) as (engine, server, names):
        other = engine.model.new_cache(40, 4)
        pages = PageBytes(other)
        remote = RemotePages(pages)
        origin = Origin(server.ranks())
        for _ in range(2):  # the second time by the same channel
            found = dict(remote.fetch(origin, names, patience))
            assert list(found) == names
        assert sum(map(len, remote._idle.values())) == 1
        assert remote.received == server.sent == 2 * len(names) * page_bytes(engine.model, 4)
        for number, (name, pieces) in enumerate(found.items()):
            for box, data in pieces:
                pages.write([number], data[None], box)
            theirs = PageBytes(engine.cache).read([engine.page_pool.nodes[name].page])
            assert torch.equal(pages.read([number]), theirs)
        unknown = [names[0], b"x" * 20, names[1]]
        assert list(dict(remote.fetch(origin, unknown, patience))) == names[:1]  # what comes behind is of no use
        until(lambda: not engine.page_pool.in_use)


@pytest.mark.parametrize("kind", ["distributed", pytest.param("nixl", marks=NIXL)])
def test_whoever_leaves_in_the_middle_leaves_nothing_pinned(kind: str) -> None:
    with served(kind) as (engine, server, names):
        remote = RemotePages(PageBytes(engine.model.new_cache(40, 4)))
        pages = remote.fetch(Origin(server.ranks()), names, patience)
        next(pages)
        assert engine.page_pool.in_use == len(names)
        pages.close()  # says so
        until(lambda: not engine.page_pool.in_use)
        channel = knock(server.address, PATIENCE)
        channel.hear()
        channel.say({"pin": [name.hex() for name in names]})
        assert channel.hear()["pages"] and engine.page_pool.in_use == len(names)
        del channel  # says nothing, as one that dies
        until(lambda: not engine.page_pool.in_use)
        assert len(dict(remote.fetch(Origin(server.ranks()), names, patience))) == len(names)


def test_what_does_not_fit_is_refused() -> None:
    with served() as (engine, server, names):
        smaller = RemotePages(PageBytes(engine.model.new_cache(40, 8)))
        with pytest.raises(ChannelBroken, match="expected"):
            list(smaller.fetch(Origin(server.ranks()), names, patience))
        mine = RemotePages(PageBytes(engine.model.new_cache(40, 4)))
        with pytest.raises(ChannelBroken, match="nobody there holds key head 1"):
            list(mine.fetch(Origin((Rank(server.address, 0, 1),)), names, patience))
        with pytest.raises(ChannelBroken):
            list(mine.fetch(Origin((Rank("127.0.0.1:1", 0, 2),)), names, patience))
        channel = knock(server.address, PATIENCE)
        channel.hear()
        channel.say({"nonsense": 1})
        with pytest.raises(ChannelBroken):
            channel.hear()
        until(lambda: not engine.page_pool.in_use)


def test_a_channel_that_is_silent_is_broken_in_time() -> None:
    door = Door()
    heard: list[object] = []

    def listen() -> None:
        heard.append(channel := Channel(door.next(), 0, PATIENCE))
        heard.append(channel.hear())

    thread = threading.Thread(target=listen)
    thread.start()
    ours = knock(door.address, PATIENCE)
    ours.say({"one": [1, 2]})
    thread.join()
    assert heard[1] == {"one": [1, 2]}
    with pytest.raises(ChannelBroken):
        ours.hear(0.05)
    with pytest.raises(ChannelBroken):
        knock("127.0.0.1:1", 5.0)
    with pytest.raises(UserError, match="there is no"):
        transport("pigeon")
