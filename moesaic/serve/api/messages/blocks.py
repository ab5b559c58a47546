"""The content, reasoning and tool calls of a chat as the blocks of a message, and the events that stream them."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

from pydantic_core import from_json

from moesaic.serve.api.service import new_id
from moesaic.serve.parsers import CallArguments, CallBroken, CallEnded, CallStarted, Content, Event, Reasoning

Block = dict[str, Any]


class BlockBuilder:
    """One block is open at a time; another kind of event closes it. `unsent` holds the events not streamed yet. Without
    `show_thinking` a thinking block has only its signature."""

    def __init__(self, show_thinking: bool = True) -> None:
        self.show_thinking = show_thinking
        self.blocks: list[Block] = []
        self.unsent: list[Block] = []
        self.open: Block | None = None
        self.written = ""  # of the open block: its thoughts, or its input as JSON
        self.streamed = 0  # blocks, with those that were taken back

    def push(self, events: list[Event]) -> list[Block]:
        for event in events:
            match event:
                case Content(text):
                    self._want("text", text="")["text"] += text
                    self._delta("text_delta", text=text)
                case Reasoning(text):
                    block = self._want("thinking", thinking="", signature="")
                    self.written += text
                    if self.show_thinking:
                        block["thinking"] += text
                        self._delta("thinking_delta", thinking=text)
                case CallStarted(_, name):
                    self.close()
                    self._want("tool_use", id=new_id("toolu_"), name=name, input={})
                case CallArguments(_, text):
                    self.written += text
                    self._delta("input_json_delta", partial_json=text)
                case CallEnded():
                    self.close()
                case CallBroken():
                    # Clients wait for the end of a block that was streamed; its input has none.
                    self.close()
                    self.blocks.pop()
        unsent, self.unsent = self.unsent, []
        return unsent

    def begin(self, blocks: list[Block]) -> None:
        """Whole blocks of what the server did itself, before the model says anything."""
        for block in blocks:
            self.blocks.append(block)
            self.streamed += 1
            place = {"index": self.streamed - 1}
            self.unsent += [
                {"type": "content_block_start", **place, "content_block": block},
                {"type": "content_block_stop", **place},
            ]

    def cite(self, citations: list[Block]) -> None:
        """What the text cites, while its block is open."""
        if self.open is None or self.open["type"] != "text" or not citations:
            return
        self.open["citations"] = citations
        for citation in citations:
            self._delta("citations_delta", citation=citation)

    def finish(self) -> list[Block]:
        self.close()
        return self.push([])

    def close(self) -> None:
        block = self.open
        if block is None:
            return
        if block["type"] == "thinking":
            block["signature"] = signature(self.written)
            self._delta("signature_delta", signature=block["signature"])
        elif block["type"] == "tool_use":
            block["input"] = input_so_far(self.written)
        self.unsent.append({"type": "content_block_stop", "index": self.streamed - 1})
        self.open, self.written = None, ""

    def _want(self, kind: str, **facts: Any) -> Block:
        """The open block, if it is of this kind; else a new one."""
        if self.open is not None and self.open["type"] == kind:
            return self.open
        self.close()
        self.open = {"type": kind, **facts}
        self.blocks.append(self.open)
        self.streamed += 1
        # A copy: an open block still changes.
        start = {"type": "content_block_start", "index": self.streamed - 1, "content_block": dict(self.open)}
        self.unsent.append(start)
        return self.open

    def _delta(self, kind: str, **facts: Any) -> None:
        delta = {"type": kind, **facts}
        self.unsent.append({"type": "content_block_delta", "index": self.streamed - 1, "delta": delta})


def signature(thoughts: str) -> str:
    """Clients send a thinking block back only if it has one. Nobody checks it: thoughts are the client's own."""
    return base64.b64encode(hashlib.sha256(thoughts.encode("utf-8", "replace")).digest()).decode()


def input_so_far(text: str) -> dict[str, Any]:
    """The arguments of a call, also of one that the limit of tokens cut off."""
    try:
        found = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
