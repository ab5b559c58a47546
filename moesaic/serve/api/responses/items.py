"""The content, reasoning and tool calls of a chat as the items of a response, and the events that stream them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from moesaic.serve.api.know.sources import Sources, file_results
from moesaic.serve.api.logprobs import TokenAligner, TokenItem
from moesaic.serve.api.responses.translate import pack
from moesaic.serve.api.service import new_id
from moesaic.serve.api.structured import json_object
from moesaic.serve.parsers import CallArguments, CallBroken, CallEnded, CallStarted, Content, Event, Reasoning

Item = dict[str, Any]


class ItemBuilder:
    """One item is open at a time; another kind of event closes it. `unsent` holds the events not streamed yet, and
    `tokens` those that made no text yet: those of content are sent with it, those of reasoning and calls are not. With
    `packed`, an item of reasoning also has `encrypted_content`."""

    def __init__(self, packed: bool = False) -> None:
        self.packed = packed
        self.items: list[Item] = []
        self.unsent: list[Item] = []
        self.tokens = TokenAligner()
        self.open: Item | None = None
        self.streamed = 0  # items, with those that were taken back

    def push(self, events: list[Event], logprobs: list[TokenItem]) -> list[Item]:
        self.tokens.add(logprobs)
        for event in events:
            match event:
                case Content(text):
                    self._message(text, last=event is events[-1])
                case Reasoning(text):
                    self.tokens.take(text, last=event is events[-1])
                    self._reasoning(text)
                case CallStarted(_, name):
                    self._open("function_call", "fc_", call_id=new_id("call_"), name=name, arguments="")
                case CallArguments(_, text):
                    assert self.open is not None
                    self.open["arguments"] += text
                    self._add("response.function_call_arguments.delta", delta=text)
                case CallEnded():
                    # One that a grammar forced ends with the completion, also where the limit of tokens cut it off.
                    assert self.open is not None
                    whole = json_object(self.open["arguments"] or "{}") is not None
                    self.close("completed" if whole else "incomplete")
                case CallBroken():
                    # Clients wait for the end of an item that was streamed; the arguments have none.
                    self._add("response.output_item.done", item=self.items.pop() | {"status": "incomplete"})
                    self.open = None
        return self._take()

    def _take(self) -> list[Item]:
        unsent, self.unsent = self.unsent, []
        return unsent

    def search(self, found: Sources, *, results: bool) -> list[Item]:
        """The server's own search, which is over; with its results where the client asked for them."""
        self.open = {"id": found.id, "type": "file_search_call", "status": "in_progress", "queries": found.queries}
        self.open["results"] = None
        self.items.append(self.open)
        self.streamed += 1
        self._add("response.output_item.added", item=self.open)
        for state in ("in_progress", "searching", "completed"):
            self._add(f"response.file_search_call.{state}")
        if results:
            self.open["results"] = file_results(found)
        self.open["status"] = "completed"
        self._add("response.output_item.done", item=self.open)
        self.open = None
        return self._take()

    def annotate(self, annotations: list[Item]) -> None:
        """Of the message, before it is closed."""
        if self.open is None or self.open["type"] != "message":
            return
        for number, annotation in enumerate(annotations):
            self.open["content"][0]["annotations"].append(annotation)
            self._add(
                "response.output_text.annotation.added",
                content_index=0,
                annotation_index=number,
                annotation=annotation,
            )

    def finish(self, complete: bool) -> list[Item]:
        if self.open is not None and self.open["type"] == "message":
            self.open["content"][0]["logprobs"] += self.tokens.rest()
        self.close("completed" if complete else "incomplete")
        return self._take()

    def close(self, status: str = "completed") -> None:
        item = self.open
        if item is None:
            return
        match item["type"]:
            case "message":
                part = item["content"][0]
                self._add("response.output_text.done", content_index=0, text=part["text"], logprobs=part["logprobs"])
                self._add("response.content_part.done", content_index=0, part=part)
            case "reasoning":
                part = item["content"][0]
                self._add("response.reasoning_text.done", content_index=0, text=part["text"])
                self._add("response.content_part.done", content_index=0, part=part)
                if self.packed:
                    item["encrypted_content"] = pack(part["text"])
            case "function_call":
                self._add("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        item["status"] = status
        self._add("response.output_item.done", item=item)
        self.open = None

    def _message(self, text: str, last: bool) -> None:
        before, logprobs = self.tokens.take(text, last) or ([], self.tokens.rest())
        if not self.items or (self.open is not None and self.open["type"] == "message"):
            logprobs = before + logprobs  # they made no text; behind anything else, they are what divides it from this
        if self.open is None or self.open["type"] != "message":
            self._open("message", "msg_", role="assistant", content=[])
            self._part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        assert self.open is not None
        self.open["content"][0]["text"] += text
        self.open["content"][0]["logprobs"] += logprobs
        self._add("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _reasoning(self, text: str) -> None:
        if self.open is None or self.open["type"] != "reasoning":
            self._open("reasoning", "rs_", summary=[], content=[])
            self._part({"type": "reasoning_text", "text": ""})
        assert self.open is not None
        self.open["content"][0]["text"] += text
        self._add("response.reasoning_text.delta", content_index=0, delta=text)

    def _part(self, part: Item) -> None:
        assert self.open is not None
        self._add("response.content_part.added", content_index=0, part=part)
        self.open["content"] = [part]

    def _open(self, kind: str, letters: str, **facts: Any) -> None:
        self.close()
        self.open = {"id": new_id(letters), "type": kind, "status": "in_progress", **facts}
        self.items.append(self.open)
        self.streamed += 1
        self._add("response.output_item.added", item=self.open)

    def _add(self, kind: str, **facts: Any) -> None:
        assert self.open is not None
        own = {} if kind.startswith("response.output_item") else {"item_id": self.open["id"]}
        # As it is now: an open item still changes.
        self.unsent.append(deepcopy({"type": kind, "output_index": self.streamed - 1, **own, **facts}))
