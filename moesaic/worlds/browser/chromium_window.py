"""A window of a real browser. Every request that its page makes is answered by the site, or not at all.

A tab is only where a page is shown just now: the page itself, and what was filled in, are kept here (`Visit`). So a few
tabs do for many windows, and a browser that was killed is started again and shows the same page. A page
that does not answer, or that breaks its tab, is an `Unresponsive` page; a browser that dies again at the same action is
an error that says so.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from moesaic.errors import UserError
from moesaic.worlds.browser.chromium import BrowserGone, Chromium, shared_chromium
from moesaic.worlds.browser.window import HOST, Outline, Request, Site, Visit, Window, request_of

SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
MOST_NODES, MOST_TEXT = 5_000, 20_000
ATTEMPTS = 3  # of an action; a browser that dies takes everybody's tabs with it
MOST_TABS = 4  # at once
MOST_REQUESTS = 100  # of a page, during an action
STARTS = 2.0  # seconds in which a click must have led somewhere, if it leads anywhere
Result = TypeVar("Result")


class Unresponsive(Exception):
    """A page that does not answer in time, or has broken down."""


class Shown(Protocol):
    """What a tab shows."""

    def answers(self, request: Request) -> tuple[int, str, str]:
        """To a request of the page: status, where to go instead, and the page."""


class Tab:
    """A page of the browser: commands in, events out; whoever waits for an answer also handles what comes between."""

    def __init__(self, browser: Chromium, seconds: float) -> None:
        self.browser, self.seconds = browser, seconds
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.shows: Shown | None = None
        self.process = os.getpid()
        self.loaded = self.started = self.refused = False
        self.requests = 0
        self.target = browser.ask("Target.createTarget", seconds, url="about:blank")["targetId"]
        self.session = browser.ask("Target.attachToTarget", seconds, targetId=self.target, flatten=True)["sessionId"]
        browser.listen(self.session, self.events)
        self.command("Page.enable")
        self.command("Fetch.enable", patterns=[{"urlPattern": "*"}])
        self.command("Page.addScriptToEvaluateOnNewDocument", source="window.open = () => null;")

    def command(self, method: str, **options: Any) -> dict[str, Any]:
        number = self.browser.send(method, self.session, self.events, **options)
        end = time.monotonic() + self.seconds
        while True:
            message = self._next(end)
            if message.get("id") == number:
                if "error" in message:
                    raise Unresponsive(f"{method}: {message['error'].get('message')}")
                return dict(message["result"])

    def show(self, address: str) -> None:
        self.loaded, self.requests = False, 0
        self.command("Page.navigate", url=address)
        self._until_loaded(self.seconds)

    def follow(self, act: Callable[[], object]) -> None:
        """Do something that may lead to another page, and arrive there."""
        self.loaded = self.started = self.refused = False
        self.requests = 0
        act()
        end = time.monotonic() + STARTS
        while not self.started and not self.refused and time.monotonic() < end:
            self._next(end, patient=True)
        if self.started:
            self._until_loaded(self.seconds)

    def evaluate(self, *arguments: object) -> dict[str, Any]:
        """`page.js` with these arguments."""
        return dict(self.run(SCRIPT, *arguments, MOST_NODES, MOST_TEXT))

    def run(self, script: str, *arguments: object) -> Any:
        """What a script's function says to these arguments, in a world that the page's own scripts cannot reach."""
        frame = self.target  # the main frame of a target has its name
        world = self.command("Page.createIsolatedWorld", frameId=frame, worldName="outline")["executionContextId"]
        code = f"({script.rstrip()}\n)({', '.join(map(json.dumps, arguments))})"
        answer = self.command("Runtime.evaluate", expression=code, contextId=world, returnByValue=True)
        if "exceptionDetails" in answer:
            raise Unresponsive("the page cannot be read")
        return json.loads(answer["result"]["value"])

    def close(self) -> None:
        self.browser.forget(self.session)
        with contextlib.suppress(BrowserGone):
            self.browser.send("Target.closeTarget", None, targetId=self.target)

    def _until_loaded(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self.loaded:
            self._next(end)

    def _next(self, end: float, patient: bool = False) -> dict[str, Any]:
        """The next message, after what can be dealt with at once has been."""
        try:
            message = self.events.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            if patient:
                return {}
            raise Unresponsive(f"no answer after {self.seconds:g} s") from None
        if "gone" in message:
            raise BrowserGone("while a page was shown")
        options = message.get("params", {})
        match message.get("method"):
            case "Fetch.requestPaused":
                self._answer(options)
            case "Page.javascriptDialogOpening":
                self.browser.send("Page.handleJavaScriptDialog", self.session, accept=options["type"] == "beforeunload")
            case "Page.loadEventFired":
                self.loaded = True
            case "Inspector.targetCrashed":
                raise Unresponsive("its process broke down")
        return message

    def _answer(self, paused: dict[str, Any]) -> None:
        asked, number = paused["request"], paused["requestId"]
        self.requests += 1
        if self.requests > MOST_REQUESTS:
            raise Unresponsive(f"more than {MOST_REQUESTS} requests")
        main = paused["resourceType"] == "Document"
        request = request_of(asked["url"], asked.get("postData") if asked["method"] == "POST" else None)
        outside = request is None or not asked["url"].startswith("http")
        if outside or asked["method"] not in ("GET", "POST"):
            self.refused = self.refused or main
            self.browser.send("Fetch.failRequest", self.session, requestId=number, errorReason="Aborted")
            return
        assert request is not None
        self.started = self.started or main
        code, location, html = self.shows.answers(request) if main and self.shows is not None else (404, "", "")
        headers = [{"name": "Content-Type", "value": "text/html; charset=utf-8"}]
        headers += [{"name": "Location", "value": location}] if location else []
        body = base64.b64encode(html.encode("utf-8", "replace")).decode()
        options = {"requestId": number, "responseCode": code, "responseHeaders": headers, "body": body}
        self.browser.send("Fetch.fulfillRequest", self.session, **options)


class ChromiumWindow(Window):
    tabs: ClassVar[list[Tab]] = []  # that no window is using just now; used longest ago first
    used: ClassVar[int] = 0  # those that some are
    changing: ClassVar[threading.Condition] = threading.Condition()

    def __init__(self, site: Site, seconds: float = 30.0) -> None:
        super().__init__(site)
        self.seconds = seconds  # that a page may take
        self.shown_again: str | None = None  # a page that is not asked for
        self.arriving: Visit | None = None
        self.read: Outline | None = None

    def outline(self) -> Outline:
        if self.read is None:
            found = self._in_tab(lambda tab: tab.evaluate("", 0, ""))
            if found is None:
                raise Unresponsive("it cannot be read")
            self.read = Outline(found["title"], found["items"], found["cut"])
        return self.read

    def close(self) -> None:
        with self.changing:
            for tab in self.tabs:
                if tab.shows is self:
                    tab.shows = None

    def _show(self) -> None:
        self.read = None
        self.close()  # the next look shows the last visit

    def _fill(self, kind: str, number: int, value: str) -> None:
        self.read = None
        self._in_tab(lambda tab: tab.evaluate(kind, number, value))
        self.visits[-1].filled.append((kind, number, value))

    def _follow(self, number: int) -> None:
        self.read = None
        self._in_tab(lambda tab: tab.follow(lambda: tab.evaluate("click", number, "")))
        if self.arriving is not None:
            self.visits.append(self.arriving)

    def answers(self, request: Request) -> tuple[int, str, str]:
        """The site's to a request of the page: status, where to go instead, and the page."""
        if self.shown_again is not None:
            html, self.shown_again = self.shown_again, None
            return 200, "", html
        self.arriving = self._received(request)
        if self.arriving.path != request.path or request.sent:
            # The browser is sent there as well, and finds what was received already.
            self.shown_again = self.arriving.html
            return 303, self.arriving.path, ""
        return 200, "", self.arriving.html

    def _arrived(self) -> bool:
        return self.arriving is not None

    def _in_tab(self, act: Callable[[Tab], Result]) -> Result | None:
        """In a tab that shows the last visit; again, in a new browser, if the browser dies meanwhile.

        None: it died when the site had answered. The page is there then, and must not be asked for twice.
        """
        for _ in range(ATTEMPTS):
            self.arriving = None
            try:
                with self._tab() as tab:
                    return act(tab)
            except BrowserGone:
                if self._arrived():
                    return None
            except Unresponsive:
                browser = shared_chromium()
                alive = browser.answers()
                browser.end()  # what hangs would go on, and whoever shares its process would wait for it
                if alive:
                    raise
        raise UserError("browser", "the Chromium on this machine ended again and again", "Take browser: text.")

    @contextlib.contextmanager
    def _tab(self) -> Iterator[Tab]:
        """One that shows this window's page, or is made to; one in which something went wrong is not used again."""
        tab = self._idle_tab()
        try:
            if tab is None:
                tab = Tab(shared_chromium(), self.seconds)
            if tab.shows is not self:
                tab.shows, visit = self, self.visits[-1]
                self.shown_again = visit.html
                tab.show(f"https://{HOST}{visit.path}")
                for kind, number, value in visit.filled:
                    tab.evaluate(kind, number, value)
            yield tab
        except BaseException:
            if tab is not None:
                tab.close()
            self._return(None)
            raise
        self._return(tab)

    def _idle_tab(self) -> Tab | None:
        """None: one is to be opened."""
        cls = ChromiumWindow
        with self.changing:
            while cls.used >= MOST_TABS:
                self.changing.wait()
            cls.tabs[:] = [tab for tab in cls.tabs if tab.browser.alive and tab.process == os.getpid()]
            own = [tab for tab in cls.tabs if tab.shows is self]
            free = own or [tab for tab in cls.tabs if tab.shows is None]
            if not free and len(cls.tabs) + cls.used >= MOST_TABS:
                free = cls.tabs
            cls.used += 1
            if not free:
                return None
            cls.tabs.remove(tab := free[0])
            return tab

    def _return(self, tab: Tab | None) -> None:
        with self.changing:
            ChromiumWindow.used -= 1
            self.tabs.extend([tab] if tab is not None else [])
            self.changing.notify()
