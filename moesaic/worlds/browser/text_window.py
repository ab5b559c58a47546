"""A window without a browser: pages are parsed here, and shown by the rules of `page.js`. Scripts are not run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlencode, urljoin

from moesaic.worlds.browser.window import Outline, Window, request_of

BLOCK = {"address", "article", "aside", "blockquote", "body", "br", "dd", "div", "dl", "dt", "fieldset", "footer"}
BLOCK |= {"form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav", "ol", "p", "pre", "section"}
BLOCK |= {"table", "td", "th", "tr", "ul"}
SKIPPED = {"script", "style", "template", "head", "noscript", "option", "svg", "iframe", "object"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
MOST_NODES, MOST_TEXT = 5_000, 20_000
MOST_DEPTH = 200


@dataclass
class Element:
    name: str
    attributes: dict[str, str]
    above: Element | None = None
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def within(self, name: str) -> Element | None:
        above = self.above
        while above is not None and above.name != name:
            above = above.above
        return above

    def every(self) -> list[Element]:
        found = []
        for child in self.children:
            if isinstance(child, Element):
                found += [child, *child.every()]
        return found


class Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self.open = Element("document", {})
        self.count = self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count += 1
        if self.count > MOST_NODES:
            return
        element = Element(tag, {name: value or "" for name, value in attrs}, self.open)
        self.open.children.append(element)
        if tag not in VOID and self.depth < MOST_DEPTH:
            self.open, self.depth = element, self.depth + 1

    def handle_endtag(self, tag: str) -> None:
        element: Element | None = self.open
        up = 0
        while element is not None and element.name != tag:
            element, up = element.above, up + 1
        if element is not None and element.above is not None:
            self.open, self.depth = element.above, self.depth - up - 1

    def handle_data(self, data: str) -> None:
        self.open.children.append(data)


class Walk:
    """The items of a page in order, and the element of every control."""

    def __init__(self, root: Element) -> None:
        self.items: list[dict[str, Any]] = []
        self.controls: list[Element] = []
        self.words = ""
        self.visited = self.length = 0
        self.cut = False
        self.body = next((element for element in root.every() if element.name == "body"), None)
        if self.body is not None:
            self.walk(self.body)
        self.flush()

    def flush(self) -> None:
        text = _squeezed(self.words)
        self.words = ""
        if text:
            self.items.append({"kind": "text", "text": text[:MOST_TEXT]})
        self.length += len(text)

    def control(self, element: Element, item: dict[str, Any]) -> None:
        self.flush()
        self.items.append(item)
        self.controls.append(element)
        self.length += 20 + len(item["label"])

    def walk(self, node: Element | str) -> None:
        self.visited += 1
        if self.cut or self.visited > MOST_NODES or self.length > MOST_TEXT:
            self.cut = True
            return
        if isinstance(node, str):
            self.words += node[:MOST_TEXT]
            return
        if node.name in SKIPPED or "hidden" in node.attributes:
            return
        if item := _control(node):
            return self.control(node, item)
        if node.name == "input":  # a hidden one
            return
        if node.name in BLOCK:
            self.flush()
        for child in node.children:
            self.walk(child)
        if node.name in BLOCK:
            self.flush()


def _control(element: Element) -> dict[str, Any] | None:
    attributes, name = element.attributes, element.name
    label = _squeezed(attributes.get("aria-label") or attributes.get("name") or "")[:200]
    kind = attributes.get("type", "text").casefold()
    if (name == "a" and "href" in attributes) or name == "button":
        return {"kind": "link" if name == "a" else "button", "label": _squeezed(element.text)[:200]}
    if name == "select":
        options = [_squeezed(option.text)[:100] for option in _options(element)[:100]]
        return {"kind": "choice", "label": label, "options": options, "value": _value(element) or ""}
    if name == "input" and kind == "checkbox":
        return {"kind": "checkbox", "label": label, "checked": "checked" in attributes}
    if name == "input" and kind == "submit":
        return {"kind": "button", "label": _squeezed(attributes.get("value", ""))[:200]}
    if name == "textarea" or (name == "input" and kind != "hidden"):
        return {"kind": "textbox", "label": label, "value": (_value(element) or "")[:500]}
    return None


def _options(select: Element) -> list[Element]:
    return [element for element in select.every() if element.name == "option"]


def _value(element: Element) -> str | None:
    """What a form would send of a control; None: nothing."""
    attributes = element.attributes
    if element.name == "select":
        options = _options(element)
        chosen = next((option for option in reversed(options) if "selected" in option.attributes), None)
        chosen = chosen or (options[0] if options else None)
        return chosen.attributes.get("value", _squeezed(chosen.text)) if chosen else None
    if element.name == "textarea":
        return element.text
    if attributes.get("type") == "checkbox":
        return attributes.get("value", "on") if "checked" in attributes else None
    return attributes.get("value", "")


def _squeezed(text: str) -> str:
    return re.sub(r"[ \t\n\r\f]+", " ", text).strip(" ")


class TextWindow(Window):
    root: Element
    walked: Walk

    def outline(self) -> Outline:
        title = next((element.text for element in self.root.every() if element.name == "title"), "")
        return Outline(_squeezed(title)[:200], self.walked.items, self.walked.cut)

    def _show(self) -> None:
        visit = self.visits[-1]
        parser = Parser()
        parser.feed(visit.html)
        parser.close()
        self.root = parser.root
        self.walked = Walk(self.root)
        for kind, number, value in visit.filled:
            self._set(kind, self.walked.controls[number - 1], value)
            self.walked = Walk(self.root)

    def _fill(self, kind: str, number: int, value: str) -> None:
        self.visits[-1].filled.append((kind, number, value))
        self._show()

    @staticmethod
    def _set(kind: str, element: Element, value: str) -> None:
        if kind == "choose":
            for option in _options(element):
                option.attributes.pop("selected", None)
                if _squeezed(option.text) == value:
                    option.attributes["selected"] = ""
        elif kind == "click":
            if "checked" in element.attributes:
                del element.attributes["checked"]
            else:
                element.attributes["checked"] = ""
        elif element.name == "textarea":
            element.children = [value]
        else:
            element.attributes["value"] = value

    def _follow(self, number: int) -> None:
        element = self.walked.controls[number - 1]
        if element.name == "a":
            return self._arrive(self._address(element.attributes["href"]), None)
        form = element.within("form")
        if form is None:
            return
        named = [control for control in form.every() if control.attributes.get("name")]
        fields = [
            (control.attributes["name"], value)
            for control in named
            if control.name in ("input", "select", "textarea") and control.attributes.get("type") != "submit"
            if (value := _value(control)) is not None
        ]
        if element.attributes.get("name"):
            fields.append((element.attributes["name"], element.attributes.get("value", "")))
        address, content = self._address(form.attributes.get("action", "")), urlencode(fields)
        if form.attributes.get("method", "get").casefold() == "post":
            return self._arrive(address, content)
        self._arrive(f"{address.partition('?')[0]}?{content}", None)

    def _address(self, reference: str) -> str:
        return urljoin(self.visits[-1].path, reference)

    def _arrive(self, address: str, sent: str | None) -> None:
        request = request_of(address, sent)
        if request is not None:  # else it leads out of the world, and nothing happens
            self._go(request)
