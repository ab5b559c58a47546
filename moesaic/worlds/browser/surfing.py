"""Tasks on a generated site: the actions of a browser, one a turn, and pages as what is seen."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass

from moesaic.worlds.browser.chromium import find_chromium
from moesaic.worlds.browser.chromium_window import Unresponsive
from moesaic.worlds.browser.window import Site, Window
from moesaic.worlds.browser.windows import BROWSERS, open_window
from moesaic.worlds.text_actions import FORM, Finished, Invalid, Simulation, World

RULES = """{about}
You see one page at a time, as text; what you can act on has a number in brackets.
Your actions:
click NUMBER (a link, a button or a checkbox)
type NUMBER TEXT (into a textbox; it replaces what is there)
choose NUMBER OPTION (of a choice)
back
{own}
{form}
For example: Action: click 1
Your task: {task}
{seen}"""


class Surfing(Simulation, Site):
    """A site that is also the task on it."""

    browser: str = "auto"
    window: Window | None = None
    ended: Finished | None = None  # by something that was done on the site

    about: str = ""
    own_actions: str = ""
    task: str = ""

    def open(self) -> str:
        """A browser is started only when something is done: the first page looks the same in all of them."""
        front = open_window(self, "text")
        front.open("/")
        return RULES.format(about=self.about, own=self.own_actions, form=FORM, task=self.task, seen=front.outline())

    def act(self, action: str) -> str | Finished:
        if (finished := self.finish(action)) is not None:
            return finished
        if self.window is None:
            self.window = open_window(self, self.browser)
            self.window.open("/")
        try:
            self._act(self.window, action)
            seen = str(self.window.outline())
        except Unresponsive as error:
            return Finished(0.0, f"The page does not answer any more ({error}).")
        return self.ended or seen

    @abstractmethod
    def finish(self, action: str) -> Finished | None:
        """What comes of an action that is not one of the browser's."""

    def _act(self, window: Window, action: str) -> None:
        if re.fullmatch(r"back\.?", action, re.I):
            return window.back()
        found = re.fullmatch(r"(click|type|choose)\s+\[?(\d{1,4})\]?(?:\s+(.*))?", action, re.I | re.S)
        if found is None:
            raise Invalid(
                f"That is no action here. Actions: click NUMBER, type NUMBER TEXT, choose NUMBER OPTION, back; "
                f"{self.own_actions}"
            )
        verb, number, value = found[1].casefold(), int(found[2]), (found[3] or "").strip().strip('"')
        if verb == "click":
            return window.click(number)
        if verb == "type":
            return window.type(number, value)
        window.choose(number, value)

    def close(self) -> None:
        if self.window is not None:
            self.window.close()


@dataclass(frozen=True)
class SiteWorld(World):
    browser: str = "auto"  # chromium, text (pages rendered here, without one), or auto: a Chromium where there is one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.browser not in BROWSERS:
            raise ValueError(f"browser is one of {', '.join(BROWSERS)}")
        if self.browser == "chromium" and find_chromium() is None:
            raise ValueError("there is no Chromium on this machine: install one, or take browser: text")
