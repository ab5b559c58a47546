"""The search for a request that asks for it: by what the user said last, or by a query that the model writes."""

from __future__ import annotations

import json
from typing import Any

from moesaic.errors import UserError
from moesaic.serve.api.chat import Chat
from moesaic.serve.api.know.sources import Sources, bounded, last_of_user, text_of
from moesaic.serve.api.knowledge import MAX_QUERY, Found
from moesaic.serve.api.schema.chat import ChatCompletionRequest
from moesaic.serve.api.service import Service

USUAL_COUNT = 5
QUERY_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documents for what answers the user's last message.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "minLength": 2, "maxLength": 200}},
            "required": ["query"],
            "additionalProperties": False,
        },
    },
}


async def find_sources(service: Service, body: ChatCompletionRequest, salt: str) -> Sources | None:
    """What is found for a request that asks for it."""
    tools = body.search_tools
    if not tools or body.tool_choice == "none":
        return None
    if len(tools) > 1:
        raise UserError("tools", "holds two of type file_search", "Name all bases in one.")
    if body.prompt_token_ids is not None:
        raise UserError("prompt_token_ids", "cannot be given together with file_search", "Give messages.")
    tool, bases = tools[0], service.settings.knowledge
    names = bases.chosen(tool.vector_store_ids, "tools")
    bases.check_method(names, tool.method, "tools")
    question = text_of(body.messages[last_of_user(body.messages)])
    query = await written_query(service, body, salt) if tool.rewrite_query else question
    if not query.strip():
        raise UserError("messages", "the last message of the user is empty: there is nothing to search for")
    found = await bases.search(names, query[:MAX_QUERY], tool.max_num_results or USUAL_COUNT, tool.method)
    found = [Found(one.base, bounded(one.passage)) for one in found]
    return Sources(bases, [query[:MAX_QUERY]], found, question)


async def written_query(service: Service, body: ChatCompletionRequest, salt: str) -> str:
    """The query that the model writes: a call that a grammar forces, so that any model can make it."""
    fields = {
        "model": body.model,
        "messages": [message.model_dump(exclude_none=True) for message in body.messages],
        "tools": [QUERY_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
        "max_tokens": 96,
        "temperature": 0.0,
        "seed": body.seed,
    }
    asking = ChatCompletionRequest.model_validate(fields)
    generation = await service.prepare(lambda: Chat.prepare(service, asking, salt), Chat.field_name)
    outputs = service.submit(generation.requests)
    try:
        async for batch in outputs.batches():
            for output in batch:
                generation.take(output)
    finally:
        outputs.close()
    calls = generation.response().choices[0].message.tool_calls or []
    try:
        query = json.loads(calls[0].function.arguments)["query"] if calls else ""
    except (ValueError, KeyError, TypeError):  # the limit of tokens cut it off
        query = ""
    return str(query).strip() or text_of(body.messages[last_of_user(body.messages)])
