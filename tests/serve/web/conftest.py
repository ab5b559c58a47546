"""A real Chromium for the tests of the page. Every test also fails if the page logs an error or asks another host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from tests.serve.web.scripted_server import ScriptedServer

expect.set_options(timeout=300_000)  # a busy machine is no fault of the page


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    server.thread.start()
    yield server
    server.stopping.set()
    server.shutdown()
    server.server_close()


class Watched:
    """What a page did that no page of ours should."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.requests: list[Request] = []

    def watch(self, page: Page) -> None:
        page.on("console", self.note)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request))

    def note(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    @property
    def hosts(self) -> set[str]:
        return {urlsplit(request.url).hostname or "" for request in self.requests if request.url.startswith("http")}


@pytest.fixture
def watched() -> Watched:
    return Watched()


@contextmanager
def opened(browser: Browser, url: str, watched: Watched, **options: Any) -> Iterator[Page]:
    """The page at an address. Once it is closed: nothing went wrong on it, and it asked this machine only."""
    context = browser.new_context(viewport={"width": 1280, "height": 820}, **options)
    context.set_default_timeout(30_000)
    page = context.new_page()
    watched.watch(page)
    page.goto(url)
    yield page
    context.close()
    assert watched.errors == []
    assert watched.hosts == {"127.0.0.1"}


@pytest.fixture
def page(browser: Browser, server: ScriptedServer, watched: Watched) -> Iterator[Page]:
    with opened(browser, server.url, watched, permissions=["clipboard-read", "clipboard-write"]) as found:
        yield found
