"""MiniMax-M3: <invoke name=NAME><KEY>VALUE</KEY>...</invoke>, every tag behind a mark; objects and lists likewise.

moesaic serve DIR --parser minimax_m3
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from moesaic.serve.parsers import Body, Parser, Tools
from moesaic.serve.parsers._elements import ElementBody
from moesaic.serve.parsers._values import argument_as_json, read_json, write_json

MARK = "]<]minimax[>["
CALLS, END_CALLS = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
CALL = f'{MARK}<invoke name="'
TAG = re.compile(re.escape(MARK) + r"<(/?)([^<>]{1,256})>")
DEEPEST = 32


@dataclass(frozen=True)
class MiniMaxM3(Parser):
    openings: ClassVar[tuple[str, ...]] = (CALLS,)
    inner: ClassVar[tuple[str, ...]] = (END_CALLS,)
    own_thinks: ClassVar[tuple[tuple[str, str], ...]] = (("<mm:think>", "</mm:think>"),)
    anywhere: ClassVar[bool] = True

    def body(self, tools: Tools, opening: str) -> Body:
        return NestedBody(tools)


class NestedBody(ElementBody):
    def __init__(self, tools: Tools, *, first: bool = True) -> None:
        super().__init__(tools)
        self.state = "open" if first else "between"

    def step(self) -> bool:
        match self.state:
            case "open":
                return self.tag(CALLS) is not None and self.to("call")
            case "call":
                return self.tag(CALL) is not None and self.to("name")
            case "between":
                return self.between(CALL, (END_CALLS,)) and self.to("name")
            case "name":
                name = self.named(">")
                if name is not None:
                    self.called = name.removesuffix('"')
                    self.begin()
                    return self.to("arguments", skip=1)
            case "arguments":
                return self.tag(f"{MARK}<") is not None and self.to("element")
            case "element":
                if self.pending[:1] != "/":
                    return bool(self.pending) and self.to("key")
                if self.tag("/invoke>") is not None:
                    self.end()
                    self.following = NestedBody(self.tools, first=False)
            case "key":
                key = self.named(">")
                if key is not None:
                    self.broken = not key
                    self.add_key(key)
                    return self.to("value", skip=1)
            case "value":
                return self._value()
        return False

    def _value(self) -> bool:
        """Up to the tag that closes the element, which may hold others of its name."""
        key, depth = self.keys[-1], 1
        for tag in TAG.finditer(self.pending):
            if tag[2] == key:
                depth += -1 if tag[1] else 1
            if not depth:
                try:
                    value = _element(self.pending[: tag.start()], self.schemas.get(key))
                except ValueError:
                    self.broken = True
                    return False
                self.add_json(write_json(value))
                return self.to("arguments", skip=tag.end())
        return False


def _element(text: str, schema: Any, depth: int = 0) -> Any:
    """The value of an element: a list of its items, an object of its elements, or its text."""
    if not text.lstrip().startswith(MARK):
        return read_json(argument_as_json(text, schema))
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    items = schema.get("items") if isinstance(schema, dict) else None
    pairs: list[tuple[str, Any]] = []
    place = 0
    while text[place:].strip():
        opened = TAG.match(text, place + len(text[place:]) - len(text[place:].lstrip()))
        if opened is None or opened[1]:
            raise ValueError("text between elements")
        level = 1
        for tag in TAG.finditer(text, opened.end()):
            if tag[2] == opened[2]:
                level += -1 if tag[1] else 1
            if not level:
                break
        else:
            raise ValueError("an element that does not end")
        own = items if opened[2] == "item" else properties.get(opened[2]) if isinstance(properties, dict) else None
        pairs.append((opened[2], _element(text[opened.end() : tag.start()], own, depth + 1)))
        place = tag.end()
    if all(name == "item" for name, _ in pairs):
        return [value for _, value in pairs]
    return dict(pairs)
