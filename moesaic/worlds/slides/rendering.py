"""Slides in the Chromium of this process: where things are on many of them at a time, and a picture of one.

    layouts(["<h1 class='x1 y0 w10'>Rain</h1>", ...])      # a Layout of each, or why there is none
    picture(html)                                           # PNG

A slide is text that a model wrote, so nothing in it may run or ask for anything: it stands in a frame of its own in
which scripts are off, a policy allows styles only, and every request of the page is refused (`chromium_window.py`).
All slides of a call are frames of one page. Where that page does not answer, each of them is tried alone, so that one
costs only itself; a browser that dies is started again.
"""

from __future__ import annotations

import base64
import contextlib
import html
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import TypeVar

from moesaic.errors import UserError
from moesaic.worlds.browser.chromium import BrowserGone, find_chromium, shared_chromium
from moesaic.worlds.browser.chromium_window import ATTEMPTS, Tab, Unresponsive
from moesaic.worlds.browser.window import HOST, Request
from moesaic.worlds.slides.layout import HEIGHT, WIDTH, Layout

HERE = files("moesaic.worlds.slides")
STYLE = HERE.joinpath("slide.css").read_text(encoding="utf-8")
MEASURE = HERE.joinpath("measure.js").read_text(encoding="utf-8")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
MOST_LENGTH = 20_000  # characters of a slide
MOST_ITEMS, MOST_TEXT = 200, 500
AT_ONCE = 32  # slides of a page
REMEMBERED = 4_096  # layouts: several rewards look at the same slide
ALONE, TOGETHER = 10.0, 30.0  # seconds that one slide may take, and a page of them
Result = TypeVar("Result")


def layouts(slides: Sequence[str]) -> list[Layout | Exception]:
    """In their order; of a slide that is there twice, the same."""
    return _renderer.layouts(slides)


def picture(slide: str, scale: float = 0.5) -> bytes:
    """A PNG of what is seen of it."""
    return _renderer.picture(slide, scale)


def why_not() -> str | None:
    """Why no slide can be shown here."""
    if find_chromium() is None:
        return "slides are laid out by a real browser, and there is no Chromium here: apt-get install chromium"
    return None


class Page:
    """What a tab asks for is this page; whatever else, it is not given."""

    def __init__(self) -> None:
        self.html = ""

    def answers(self, request: Request) -> tuple[int, str, str]:
        return 200, "", self.html


class Renderer:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.page = Page()
        self.tab: Tab | None = None
        self.known: OrderedDict[str, Layout | Exception] = OrderedDict()

    def layouts(self, slides: Sequence[str]) -> list[Layout | Exception]:
        with self.lock:
            new = [slide for slide in dict.fromkeys(slides) if slide not in self.known]
            fit = [slide for slide in new if len(slide) <= MOST_LENGTH]
            found: dict[str, Layout | Exception] = {}
            for begin in range(0, len(fit), AT_ONCE):
                some = fit[begin : begin + AT_ONCE]
                found |= zip(some, self._measured(some), strict=True)
            found |= {s: ValueError(f"longer than {MOST_LENGTH:,} characters") for s in new if s not in found}
            said = [found.get(slide) or self.known[slide] for slide in slides]
            # What could not be shown may have been the browser's fault, and is tried again the next time.
            self.known |= {slide: layout for slide, layout in found.items() if isinstance(layout, Layout)}
            while len(self.known) > REMEMBERED:
                self.known.popitem(last=False)
            return said

    def picture(self, slide: str, scale: float) -> bytes:
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": scale}

        def shoot(tab: Tab) -> bytes:
            tab.command(
                "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
            )
            return base64.b64decode(tab.command("Page.captureScreenshot", format="png", clip=clip)["data"])

        with self.lock:
            return self._in_tab([slide[:MOST_LENGTH]], shoot, ALONE)

    def _measured(self, slides: Sequence[str]) -> list[Layout | Exception]:
        def measure(tab: Tab) -> list[Layout | Exception]:
            return [Layout.read(items) for items in tab.run(MEASURE, MOST_ITEMS, MOST_TEXT)]

        try:
            return self._in_tab(slides, measure, TOGETHER if len(slides) > 1 else ALONE)
        except Exception as error:
            return [error] if len(slides) == 1 else [self._measured([slide])[0] for slide in slides]

    def _in_tab(self, slides: Sequence[str], act: Callable[[Tab], Result], seconds: float) -> Result:
        """In a tab that shows these slides, one below the other; again, in a new browser, if it dies meanwhile."""
        self.page.html = page_of(slides)
        for _ in range(ATTEMPTS):
            try:
                tab = self._open(seconds)
                tab.show(f"https://{HOST}/")
                return act(tab)
            except BrowserGone:
                self.tab = None
            except Unresponsive:
                self.tab = None
                with contextlib.suppress(BrowserGone):
                    shared_chromium().end()  # what hangs would go on, and take the time of all others
                raise
        raise UserError("slides", "the Chromium on this machine ended again and again", "See whether it has memory.")

    def _open(self, seconds: float) -> Tab:
        tab = self.tab
        if tab is None or not tab.browser.alive or tab.process != os.getpid():
            tab = self.tab = Tab(shared_chromium(), seconds)
            tab.shows = self.page
        tab.seconds = seconds
        return tab


def page_of(slides: Sequence[str]) -> str:
    """Scripts are off in a frame that is not allowed them; ours, outside of it, may look in."""
    style = f"body {{ margin: 0 }} iframe {{ width: {WIDTH}px; height: {HEIGHT}px; border: 0; display: block }}"
    frames = "".join(
        f'<iframe sandbox="allow-same-origin" scrolling="no" srcdoc="{html.escape(document_of(slide))}"></iframe>'
        for slide in slides
    )
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    return whole(f"{policy}<style>{style}</style>", frames)


def document_of(slide: str) -> str:
    return whole(f"<style>{STYLE}</style>", slide)


def whole(head: str, body: str) -> str:
    return f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">{head}</head><body>{body}</body></html>'


_renderer = Renderer()
