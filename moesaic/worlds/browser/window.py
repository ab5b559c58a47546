"""A browser for agents: pages of a generated site, shown as text, with numbered controls to act on.

    window = open_window(site)          # windows.py: a Chromium where there is one, else pages rendered here
    window.open("/")
    print(window.outline())             # [1] textbox Search: "" ...
    window.type(1, "lamp"); window.click(2); window.back()

A site is a Python object that answers requests; no port is opened for it. Both kinds of window show the same text and
obey the same rules, so that an episode does not depend on which of them it was played in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from moesaic.worlds.text_actions import Invalid

HOST = "site.test"  # a name that no resolver knows
MOST_SHOWN = 4_000  # characters of a page
MOST_REDIRECTS = 5


@dataclass(frozen=True)
class Request:
    path: str
    fields: Mapping[str, str] = field(default_factory=dict)  # of the query, or of a form that was sent
    sent: bool = False  # by POST: it may change what the site holds


@dataclass(frozen=True)
class Response:
    html: str = ""
    location: str = ""  # where to go instead


class Site(ABC):
    @abstractmethod
    def respond(self, request: Request) -> Response:
        """The page of a path. Whatever is asked for gets an answer."""


def request_of(address: str, sent: str | None = None) -> Request | None:
    """What an address on the site asks for; None if it lies elsewhere."""
    parts = urlsplit(address)
    if parts.scheme not in ("", "http", "https") or parts.netloc not in ("", HOST):
        return None
    query = parts.query if sent is None else sent
    return Request(parts.path or "/", dict(parse_qsl(query, keep_blank_values=True)), sent is not None)


def page(title: str, body: str) -> Response:
    return Response(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head>'
        f"<body><h1>{escape(title)}</h1>{body}</body></html>"
    )


def link(path: str, text: str) -> str:
    return f'<a href="{escape(path)}">{escape(text)}</a>'


def textbox(name: str, label: str, value: str = "") -> str:
    return f'<input type="text" name="{escape(name)}" aria-label="{escape(label)}" value="{escape(value)}">'


def choice(name: str, label: str, options: list[str], chosen: str = "") -> str:
    shown = "".join(f"<option{' selected' if option == chosen else ''}>{escape(option)}</option>" for option in options)
    return f'<select name="{escape(name)}" aria-label="{escape(label)}">{shown}</select>'


def checkbox(name: str, label: str, on: bool = False) -> str:
    return f'<input type="checkbox" name="{escape(name)}" aria-label="{escape(label)}"{" checked" if on else ""}>'


def form(path: str, content: str, button: str, send: bool = True) -> str:
    method = "post" if send else "get"
    return f'<form action="{escape(path)}" method="{method}">{content}<button>{escape(button)}</button></form>'


@dataclass(frozen=True)
class Outline:
    """What is on a page, in order: texts, and the controls that an action may name by their numbers."""

    title: str
    items: list[dict[str, Any]]
    cut: bool = False  # the page goes on

    @property
    def controls(self) -> list[dict[str, Any]]:
        return [item for item in self.items if item["kind"] != "text"]

    def __str__(self) -> str:
        lines, number = [f"Page: {self.title}"], 0
        for item in self.items:
            if item["kind"] == "text":
                lines.append(item["text"])
                continue
            number += 1
            lines.append(f"[{number}] {_shown(item)}")
        text = "\n".join(lines)
        return f"{text[:MOST_SHOWN]}\n..." if self.cut or len(text) > MOST_SHOWN else text


def _shown(item: dict[str, Any]) -> str:
    kind, label = item["kind"], item["label"]
    if kind == "textbox":
        return f'textbox {label}: "{item["value"]}"'
    if kind == "choice":
        return f"choice {label}: {item['value']} (of {', '.join(item['options'])})"
    if kind == "checkbox":
        return f"checkbox {label}: {'on' if item['checked'] else 'off'}"
    return f"{kind}: {label}"


@dataclass
class Visit:
    """A page as it was received, and what has been filled in on it since: all that is needed to show it again."""

    path: str
    html: str
    filled: list[tuple[str, int, str]] = field(default_factory=list)  # kind of action, number of control, value


class Window(ABC):
    """One window of one episode. What it shows is remembered here, so that a browser may come and go below it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.visits: list[Visit] = []

    def open(self, path: str) -> None:
        self._go(request_of(path) or Request("/"))

    def click(self, number: int) -> None:
        control = self._control(number)
        if control["kind"] in ("textbox", "choice"):
            raise Invalid(f"[{number}] is a {control['kind']}: {_verb(control['kind'])} it.")
        if control["kind"] == "checkbox":
            return self._fill("click", number, "")
        self._follow(number)

    def type(self, number: int, text: str) -> None:
        control = self._control(number)
        if control["kind"] != "textbox":
            raise Invalid(f"[{number}] is a {control['kind']}, and takes no text.")
        self._fill("type", number, text)

    def choose(self, number: int, option: str) -> None:
        control = self._control(number)
        if control["kind"] != "choice":
            raise Invalid(f"[{number}] is a {control['kind']}, and has no options.")
        found = [known for known in control["options"] if known.casefold() == option.casefold()]
        if not found:
            raise Invalid(f'[{number}] has no option "{option}", but {", ".join(control["options"])}.')
        self._fill("choose", number, found[0])

    def back(self) -> None:
        if len(self.visits) < 2:
            raise Invalid("There is no page to go back to.")
        self.visits.pop()
        self._show()

    @abstractmethod
    def outline(self) -> Outline:
        """What is on the page now."""

    def close(self) -> None:
        return None

    @abstractmethod
    def _show(self) -> None:
        """The last visit, with what was filled in."""

    @abstractmethod
    def _fill(self, kind: str, number: int, value: str) -> None: ...

    @abstractmethod
    def _follow(self, number: int) -> None:
        """Click a link or a button, and arrive where it leads."""

    def _control(self, number: int) -> dict[str, Any]:
        controls = self.outline().controls
        if not 1 <= number <= len(controls):
            raise Invalid(f"There is no [{number}] on this page, which has [1] to [{len(controls)}].")
        return controls[number - 1]

    def _go(self, request: Request) -> None:
        self.visits.append(self._received(request))
        self._show()

    def _received(self, request: Request) -> Visit:
        """The page that a request leads to in the end."""
        response = self.site.respond(request)
        for _ in range(MOST_REDIRECTS):
            if not response.location:
                break
            request = request_of(response.location) or Request("/")
            response = self.site.respond(request)
        return Visit(request.path, response.html)


def _verb(kind: str) -> str:
    return {"textbox": "type into", "choice": "choose an option of"}[kind]
