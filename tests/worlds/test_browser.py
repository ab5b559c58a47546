"""Sites in a real browser and without one: the same pages, whatever happens to the browser, and nothing gets out."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.worlds.browser import chromium
from moesaic.worlds.browser.chromium import end_shared, find_chromium, shared_chromium
from moesaic.worlds.browser.chromium_window import ChromiumWindow
from moesaic.worlds.browser.surfing import Surfing
from moesaic.worlds.browser.text_window import TextWindow
from moesaic.worlds.browser.window import Request, Response, Site, Window, page
from moesaic.worlds.browser.windows import open_window
from moesaic.worlds.environments import Environment
from moesaic.worlds.environments.browse import Browsing
from moesaic.worlds.environments.shop import Goal, Product, Shop
from moesaic.worlds.text_actions import Finished, Invalid
from tests.worlds.site_solvers import browse, shop


@pytest.fixture(scope="module", autouse=True)
def one_browser() -> Iterator[None]:
    assert find_chromium(), "these tests need a Chromium: apt-get install chromium"
    yield
    end_shared()


def played(simulation: Surfing, solver: object, harm: object = None) -> list[str]:
    """Everything that was seen, to the end; `harm` is done to the browser before some actions."""
    seen: list[str] = [simulation.open()]
    solving = solver(seen[0])  # type: ignore[operator]
    action = next(solving)
    for turn in range(60):
        if harm is not None and turn % 4 == 2:
            harm()  # type: ignore[operator]
        now = simulation.act(action)
        if isinstance(now, Finished):
            simulation.close()
            return [*seen, f"{now.score} {now.observation}"]
        seen.append(now)
        action = solving.send(now)
    raise AssertionError(seen[-1])


def kill() -> None:
    os.killpg(shared_chromium().keeper.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", range(4))
def test_a_browser_shows_what_is_shown_without_one_even_if_it_is_killed(number: int) -> None:
    plain = played(Browsing(random.Random(number), number, "text"), browse)
    assert plain[-1].startswith("1.0")
    harm = kill if number == 0 else None
    assert played(Browsing(random.Random(number), number, "chromium"), browse, harm) == plain


def test_a_shop_in_a_browser() -> None:
    plain = played(Shop(random.Random(5), "text"), shop)
    assert plain[-1].startswith("1.0 You have bought")
    assert played(Shop(random.Random(5), "chromium"), shop) == plain


def test_what_is_bought_is_judged_in_parts() -> None:
    goal = Goal("lamp", "furniture", ("oak", "foldable"), {"colour": "red", "size": "small"}, 1000)
    lamp = Product(0, "Fenn", "furniture", "lamp", ("oak", "foldable", "two-tone"), ("red",), ("small",), 900)
    assert goal.reward(lamp, {"colour": "red", "size": "small"}) == 1.0
    assert goal.reward(lamp, {"colour": "red", "size": "large"}) == pytest.approx(4 / 5)
    chair = Product(0, "Fenn", "furniture", "chair", ("oak", "lined", "two-tone"), ("red",), ("small",), 1100)
    assert goal.reward(chair, {"colour": "red"}) == pytest.approx(0.5 * 2 / 5)
    hat = Product(0, "Fenn", "clothing", "hat", ("oak", "foldable"), ("red",), ("small",), 900)
    assert goal.reward(hat, {"colour": "red", "size": "small"}) == 0.0


class Canary:
    """A server beside the browser, on this machine, that counts who comes."""

    def __init__(self) -> None:
        self.visited = 0
        canary = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                canary.visited += 1
                self.send_response(200)
                self.end_headers()

            do_POST = do_OPTIONS = do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                return None

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def canary() -> Iterator[Canary]:
    found = Canary()
    yield found
    found.server.shutdown()
    found.server.server_close()


class Hostile(Site):
    def __init__(self, body: str) -> None:
        self.body = body

    def respond(self, request: Request) -> Response:
        return page("Hostile", self.body if request.path == "/" else "<p>elsewhere</p>")


LEAKS = """<img src="{it}/a"><iframe src="{it}/b"></iframe><link rel="stylesheet" href="{it}/c">
<link rel="preconnect" href="{it}"><link rel="dns-prefetch" href="{it}">
<object data="{it}/d"></object><video src="{it}/e"></video>
<script>
fetch("{it}/f", {{mode: "no-cors"}}).catch(() => 0);
navigator.sendBeacon("{it}/g", "x");
try {{ new WebSocket("{it}/h".replace("http", "ws")); }} catch (error) {{}}
try {{ new EventSource("{it}/i"); }} catch (error) {{}}
try {{ new Worker(URL.createObjectURL(new Blob(['fetch("{it}/j")']))); }} catch (error) {{}}
try {{ new RTCPeerConnection({{iceServers: [{{urls: "stun:127.0.0.1:{port}"}}]}}).createDataChannel("x"); }}
catch (error) {{}}
window.open("{it}/k");
</script><a href="{it}/l">out</a><form action="{it}/m" method="post"><button>Send</button></form>
<a href="file:///etc/passwd">file</a><p>here</p>"""


def test_nothing_gets_out_of_a_browser(canary: Canary) -> None:
    where = f"http://127.0.0.1:{canary.port}"
    window = ChromiumWindow(Hostile(LEAKS.format(it=where, port=canary.port)))
    window.open("/")
    assert "here" in str(window.outline())
    for control in (1, 2, 3):
        window.click(control)
        assert "here" in str(window.outline()) and len(window.visits) == 1  # it leads nowhere
    assert canary.visited == 0
    window.close()


@pytest.mark.parametrize(
    "script",
    [
        "while (true) {}",
        "document.addEventListener('click', () => { while (true) {} })",
        "setInterval(() => { for (let n = 0; n < 99; n++) fetch('/again' + n) }, 1)",
        "let a = []; setInterval(() => { while (true) a.push(new Array(1e6).fill(1)) }, 0)",
    ],
)
def test_a_page_that_hangs_ends_the_episode(script: str) -> None:
    class Hanging(Surfing):
        browser = "chromium"

        def respond(self, request: Request) -> Response:
            return page("Hostile", f'<a href="/on">on</a><script>{script}</script>')

        def finish(self, action: str) -> Finished | None:
            return None

    simulation = Hanging()
    simulation.window = ChromiumWindow(simulation, seconds=4.0)
    simulation.window.open("/")
    seen = simulation.act("click 1")
    assert isinstance(seen, Finished) and seen.score == 0.0 and "does not answer" in seen.observation
    good = ChromiumWindow(Hostile("<p>fine</p>"))
    good.open("/")
    assert "fine" in str(good.outline())  # and nobody else is hurt


@pytest.mark.parametrize(
    "body",
    [
        "<script>alert(1); confirm(2); prompt(3)</script><p>here</p>",
        "<script>onbeforeunload = (event) => { event.preventDefault(); return 'stay' }</script><p>here</p>",
        "<p>here</p>" + "<div><p>deep</p>" * 6_000,
        "<p>here</p>" + "x" * 300_000,
        "<script>Array.prototype.push = JSON.stringify = String.prototype.trim = () => 'caught'; "
        "Object.defineProperty(document, 'title', {get: () => { throw 1 }})</script><p>here</p>",
        "<a href='javascript:while(0);alert(1)'>on</a><p>here</p>",
    ],
)
def test_hostile_pages_are_shown_like_others(body: str) -> None:
    window = ChromiumWindow(Hostile(body))
    window.open("/")
    text = str(window.outline())
    assert "here" in text and "caught" not in text and len(text) < 5_000
    window.open("/other")
    assert "elsewhere" in str(window.outline())
    window.close()


def test_a_browser_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    window = ChromiumWindow(Hostile('<p>here</p><a href="/next">on</a>'), seconds=6.0)
    window.open("/")
    assert "here" in str(window.outline())
    stuck = shared_chromium()
    monkeypatch.setattr(stuck, "ask", functools.partial(stuck.ask, seconds=2.0))
    os.killpg(stuck.keeper.pid, signal.SIGSTOP)
    window.click(1)
    assert "elsewhere" in str(window.outline())
    assert shared_chromium() is not stuck and stuck.keeper.poll() is not None and not os.path.exists(stuck.profile)


def test_a_browser_that_dies_again_and_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    window = ChromiumWindow(Hostile("<p>here</p>"))
    window.open("/")
    monkeypatch.setattr("moesaic.worlds.browser.chromium_window.Tab", lambda browser, seconds: browser.ask("No.such"))
    ChromiumWindow.tabs.clear()
    with pytest.raises(UserError, match="ended again and again"):
        window.outline()


def test_without_a_browser_pages_are_rendered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chromium, "find_chromium", lambda: None)
    for user in ("surfing", "windows"):
        monkeypatch.setattr(f"moesaic.worlds.browser.{user}.find_chromium", lambda: None)
    assert isinstance(open_window(Hostile("")), TextWindow)
    with pytest.raises(UserError, match="install one, or take browser: text"):
        build(Method("shop", {"browser": "chromium"}), Environment, "test")
    with pytest.raises(UserError, match="no Chromium"):
        chromium.Chromium()


@pytest.mark.parametrize("kind", [TextWindow, ChromiumWindow])
def test_actions_that_do_not_fit_are_refused(kind: type[Window]) -> None:
    body = '<form action="/to"><input name="a"><select name="b"><option>x</option></select><button>Go</button></form>'
    window = kind(Hostile(body))
    window.open("/")
    for wrong in (
        lambda: window.click(1),
        lambda: window.click(2),
        lambda: window.type(3, "x"),
        lambda: window.choose(2, "y"),
        lambda: window.choose(1, "x"),
        lambda: window.click(4),
        lambda: window.click(0),
        window.back,
    ):
        with pytest.raises(Invalid):
            wrong()
