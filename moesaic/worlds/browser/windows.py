"""Which kind of window an episode gets: of a Chromium where one is installed, else pages are rendered here."""

from __future__ import annotations

from moesaic.worlds.browser.chromium import find_chromium
from moesaic.worlds.browser.chromium_window import ChromiumWindow
from moesaic.worlds.browser.text_window import TextWindow
from moesaic.worlds.browser.window import Site, Window

BROWSERS = ("auto", "chromium", "text")


def open_window(site: Site, browser: str = "auto") -> Window:
    if browser == "text" or (browser == "auto" and find_chromium() is None):
        return TextWindow(site)
    return ChromiumWindow(site)
