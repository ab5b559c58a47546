"""The Model Context Protocol's own client, against the server's endpoint for its knowledge bases."""

from __future__ import annotations

import json
from typing import Any

from mcp import Client


def said(result: Any) -> Any:
    """The one text of a tool's answer, which is JSON."""
    assert not result.is_error
    (content,) = result.content
    return json.loads(content.text)


async def check_tools_are_listed(at: Any) -> None:
    async with Client(f"{at.url}/mcp") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {"search", "fetch"}
    assert all(tool.annotations is not None and tool.annotations.read_only_hint for tool in tools.values())
    assert "query" in tools["search"].input_schema["required"]


async def check_what_is_found_can_be_fetched(at: Any) -> None:
    async with Client(f"{at.url}/mcp") as client:
        result = await client.call_tool("search", {"query": "Where does the Danube end?", "k": 1})
        fetched = await client.call_tool("fetch", {"id": said(result)["results"][0]["id"]})
    assert "Black Sea" in json.dumps(said(fetched))


async def check_a_wrong_call_is_told(at: Any) -> None:
    async with Client(f"{at.url}/mcp") as client:
        result = await client.call_tool("fetch", {"id": "nothing"})
    assert result.is_error
