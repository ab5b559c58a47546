"""The input of a response as the items that a client may list: every one with an id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.schema.responses import (
    InputFileSearch,
    InputFunctionCall,
    InputFunctionOutput,
    InputItem,
    InputMessage,
    InputReasoning,
    ItemList,
    ItemReference,
)
from moesaic.serve.api.service import new_id

Item = dict[str, Any]


def listed_input(given: str | Sequence[InputItem] | None) -> list[Item]:
    if isinstance(given, str):
        given = [InputMessage(role="user", content=given)]
    return [_listed(item) for item in given or ()]


def _listed(item: InputItem) -> Item:
    match item:
        case InputMessage():
            kind = "output_text" if item.role == "assistant" else "input_text"
            parts = [item.content] if isinstance(item.content, str) else item.content
            texts = [part if isinstance(part, str) else part.text for part in parts]
            more: Item = {"annotations": []} if item.role == "assistant" else {}
            content = [{"type": kind, "text": text, **more} for text in texts]
            return _with_id(item, "msg_", role=item.role, content=content)
        case InputFunctionCall():
            return _with_id(item, "fc_", call_id=item.call_id, name=item.name, arguments=item.arguments)
        case InputFunctionOutput():
            return _with_id(item, "fco_", call_id=item.call_id, output=item.model_dump()["output"])
        case InputReasoning():
            plain = item.model_dump(include={"content", "encrypted_content"}, exclude_none=True)
            summary = [part.model_dump() for part in item.summary or ()]
            return _with_id(item, "rs_", summary=summary, **plain)
        case InputFileSearch():
            return _with_id(item, "fs_", queries=item.queries or [], results=item.results)
        case ItemReference():
            raise AssertionError("what it refers to has taken its place")


def _with_id(item: InputItem, letters: str, **facts: Any) -> Item:
    return {"id": item.id or new_id(letters), "type": item.type, "status": "completed", **facts}


def page(items: Sequence[Item], after: str | None, limit: int, order: Literal["asc", "desc"]) -> ItemList:
    """So many of them behind the one whose id is `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ApiError(404, f"there is no item {after[:64]!r}", param="after", code="item_not_found")
        ordered = ordered[places[0] + 1 :]
    shown = ordered[:limit]
    return ItemList(
        data=shown,
        first_id=shown[0]["id"] if shown else None,
        last_id=shown[-1]["id"] if shown else None,
        has_more=len(shown) < len(ordered),
    )
