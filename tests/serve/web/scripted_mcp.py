"""An MCP server over streamable HTTP with two tools, on an origin of its own, so that the page's part can be tested.

It answers with JSON, or with a stream of events where `streams` is set, as real servers choose to.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "inputSchema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        "annotations": {"readOnlyHint": True},
    },
    {"name": "note", "description": "Return a note.", "inputSchema": {"type": "object", "properties": {}}},
]


class ScriptedMcp(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # a browser opens many connections at once

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.streams = False
        self.note = "A note."
        self.called: list[dict[str, Any]] = []
        self.methods: list[str] = []
        self.sessions: list[str | None] = []
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def url(self) -> str:
        return f"{self.origin}/mcp"

    def result(self, method: str, params: dict[str, Any]) -> Any:
        if method == "initialize":
            info = {"name": "sums", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": info}
        if method == "tools/list":  # in two pages
            return {"tools": TOOLS[1:]} if params.get("cursor") else {"tools": TOOLS[:1], "nextCursor": "2"}
        self.called.append(params)
        text = str(params["arguments"]["a"] + params["arguments"]["b"]) if params["name"] == "add" else self.note
        return {"content": [{"type": "text", "text": text}], "isError": False}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection that is closed after each answer may be reset under the next request
    server: ScriptedMcp

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_OPTIONS(self) -> None:
        self.send_response(204)
        self.allow_origin()
        self.end_headers()

    def allow_origin(self) -> None:
        self.send_header("Access-Control-Allow-Origin", self.headers.get("Origin", "*"))
        self.send_header("Access-Control-Allow-Headers", "content-type, mcp-session-id, mcp-protocol-version")
        self.send_header("Access-Control-Expose-Headers", "mcp-session-id")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.methods.append(message["method"])
        self.server.sessions.append(self.headers.get("Mcp-Session-Id"))
        self.send_response(200 if "id" in message else 202)
        self.allow_origin()
        self.send_header("Mcp-Session-Id", "session-1")
        body = b""
        if "id" in message:
            result = self.server.result(message["method"], message.get("params", {}))
            reply = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result})
            notice = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}})
            body = (f"data: {notice}\n\ndata: {reply}\n\n" if self.server.streams else reply).encode()
            kind = "text/event-stream" if self.server.streams else "application/json"
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
