"""Threads of Anthropic's API: the server keeps a conversation, and the client sends only what is new of it.

`{"type": "create"}` keeps a conversation under the id of its answer, `{"type": "continue", "previous_message_id": ...}`
goes on from there, with the system prompt and the tools it began with. They lie in the store of responses, for its time
and within its memory; a client that hears that one is gone sends the whole conversation again.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter

from moesaic.serve.api.errors import ApiError
from moesaic.serve.api.responses.store import ResponseStore, Stored
from moesaic.serve.api.schema.messages import ContinueThread, InputMessage, MessageResponse, MessagesRequest

MESSAGES: TypeAdapter[list[InputMessage]] = TypeAdapter(list[InputMessage])
FIXED = ("system", "tools")  # for all turns of a thread


def resume(store: ResponseStore, body: MessagesRequest, owner: str) -> MessagesRequest:
    """The request with the whole conversation that it continues."""
    if body.thread is None:
        return body
    if not store.enabled:
        message = "thread: this server keeps no conversations; send the whole conversation without it"
        raise ApiError(400, message, param="thread", code="thread_unsupported_request")
    own = [message.model_dump(exclude_none=True) for message in body.messages]
    if isinstance(body.thread, ContinueThread):
        body = _with_earlier(store, body, body.thread.previous_message_id, _space(owner))
    body._owner, body._own = _space(owner), own
    return body


def _with_earlier(store: ResponseStore, body: MessagesRequest, name: str, owner: str) -> MessagesRequest:
    try:
        turns = store.chain(owner, name)
    except ApiError as error:
        message = (
            f"thread.previous_message_id: there is no thread at {name[:64]!r}; create one with all of its messages"
        )
        raise ApiError(error.status, message, code="thread_not_found") from None
    kept: dict[str, Any] = json.loads(turns[0].input)
    for field in FIXED:
        given = body.model_dump(include={field}, exclude_none=True).get(field)
        if given is not None and given != kept.get(field):
            message = f"{field}: is not that of the thread; leave it out, or create a new thread"
            raise ApiError(400, message, param=field, code="thread_fingerprint_mismatch")
    said: list[dict[str, Any]] = []
    for turn in turns:
        said += json.loads(turn.input)["messages"]
        said.append({"role": "assistant", "content": turn.response()["content"]})
    first = MessagesRequest.model_validate(
        {"max_tokens": 1, "messages": said} | {name: kept.get(name) for name in FIXED}
    )
    fixed = {name: getattr(first, name) for name in FIXED}
    return body.model_copy(update={"messages": [*first.messages, *body.messages], **fixed})


def keep(store: ResponseStore, body: MessagesRequest, response: MessageResponse) -> None:
    if body.thread is None:
        return
    turn: dict[str, Any] = {"messages": body._own}
    previous = body.thread.previous_message_id if isinstance(body.thread, ContinueThread) else None
    if previous is None:
        turn |= body.model_dump(include=set(FIXED), exclude_none=True)
    content = json.dumps({"content": response.content}).encode()
    store.add(Stored(response.id, body._owner, previous, json.dumps(turn).encode(), content=content))


def _space(owner: str) -> str:
    """No thread is found as a response, nor a response as a thread."""
    return f"threads of {owner}"
