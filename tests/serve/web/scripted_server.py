"""A server that says what a test tells it to, so that the page can be tested to the letter.

python -m tests.serve.web.scripted_server      the page, with an invented model behind it, to look at and work on
"""

from __future__ import annotations

import json
import math
import random
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moesaic.serve.api import web_page
from moesaic.serve.api.schema.chat import ChatCompletionRequest

NAME = "scripted-moe-7b"


class ScriptedServer(ThreadingHTTPServer):
    """`answer` is what it says, or the first of `answers` as long as there are any; `calls` are the tool calls of the
    next answer; with `endless` it goes on until the client has gone."""

    daemon_threads = True
    request_queue_size = 64  # a browser opens many connections at once

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.files = web_page.files()
        self.answer = "Hello there."
        self.answers: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.context = 4096
        self.adapters: list[str] = []
        self.mcp_origins: list[str] = []
        self.ignored: str | None = None
        self.know: list[str] = []
        self.found: list[dict[str, Any]] = []  # passages, for a request that searches
        self.cites: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.reasoning = ""
        self.endless = False
        self.sampling: dict[str, float] = {}
        self.pause = 0.0  # seconds between tokens
        self.key: str | None = None
        self.error: tuple[int, str] | None = None
        self.layers, self.experts = 6, 32
        self.asked: list[dict[str, Any]] = []
        self.running = 0
        self.written = 0
        self.abandoned = threading.Event()
        self.counts = [[0] * self.experts for _ in range(self.layers)]
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is nothing to report."""

    def card(self, name: str) -> dict[str, Any]:
        parent = None if name == NAME else NAME
        return {
            "id": name,
            "object": "model",
            "parent": parent,
            "max_model_len": self.context,
            "sampling": self.sampling,
        }

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Tokens, each with the field of the delta that holds it."""
        answer = self.answers.pop(0) if self.answers else self.answer
        for field, text in (("reasoning_content", self.reasoning), ("content", answer)):
            for piece in tokens_of(text):
                yield field, piece
        while self.endless:
            yield "content", " more"

    def work(self) -> None:
        """One token's worth of it."""
        self.written += 1
        for layer, row in enumerate(self.counts):
            for _ in range(2):
                row[int(random.betavariate(1 + layer, 3) * self.experts) % self.experts] += 1

    def live(self) -> dict[str, Any]:
        return {
            "running": self.running,
            "waiting": 0,
            "cache_share": min(1.0, self.written / 2000),
            "tokens_per_second": 41.5 * self.running,
            "ttft_seconds": 0.12 if self.written else None,
            "experts": {str(layer): row for layer, row in enumerate(self.counts)},
        }


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer
    protocol_version = "HTTP/1.1"  # one connection for the page's many files

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path in self.server.files:
            file = self.server.files[path]
            self.send_body(file.read_bytes(), web_page.kind(file), headers=web_page.headers(self.server.mcp_origins))
        elif not self.allowed():
            return
        elif path == "/v1/models":
            cards = [self.server.card(name) for name in (NAME, *self.server.adapters)]
            self.send_json({"object": "list", "data": cards})
        elif path == "/page.json":
            self.send_json({"mcp_origins": self.server.mcp_origins, "know": self.server.know})
        elif path == "/openapi.json":
            schema = ChatCompletionRequest.model_json_schema()
            self.send_json({"components": {"schemas": {"ChatCompletionRequest": schema}}})
        elif path == "/live/stream":
            self.begin_events()
            while not self.server.stopping.wait(0.1):
                self.send_event(self.server.live())
        else:
            self.send_body(b"", "text/plain", 404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        if self.path == "/tokenize":
            self.server.tokenized.append(asked)
            self.send_json({"count": count_tokens(asked), "max_model_len": self.server.context, "tokens": []})
            return
        self.server.asked.append(asked)
        if self.server.error:
            status, message = self.server.error
            self.send_json({"error": {"message": message}}, status)
            return
        if count_tokens(asked) >= self.server.context:
            self.send_json({"error": {"message": "too long", "code": "context_length_exceeded"}}, 400)
            return
        if not asked.get("stream"):
            text = "".join(piece for _, piece in self.server.pieces())
            self.send_json({"choices": [{"message": {"role": "assistant", "content": text}}]})
            return
        self.server.running += 1
        try:
            self.stream(asked)
        except OSError:
            self.server.abandoned.set()
        finally:
            self.server.running -= 1

    def stream(self, asked: dict[str, Any]) -> None:
        self.begin_events()
        likely = random.Random(7)
        count = 0
        searches = any(tool["type"] == "file_search" for tool in asked.get("tools", ()))
        if searches:
            first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            self.send_event({"choices": [first], "search_results": self.server.found})
        for field, piece in self.server.pieces():
            if self.server.stopping.wait(self.server.pause or (0.005 if self.server.endless else 0)):
                return
            count += 1
            self.server.work()
            share = likely.choice([0.02, 0.1, 0.3, 0.55, 0.75, 0.9, 0.99, 0.999])
            top = [token_info(piece, share)] + [token_info(f" other{n}", (1 - share) / (n + 2)) for n in range(4)]
            shown = {**top[0], "top_logprobs": sorted(top, key=lambda info: -info["logprob"])}
            choice = {"index": 0, "delta": {field: piece}, "finish_reason": None}
            if asked.get("logprobs"):
                choice["logprobs"] = {"content": [shown]}
            self.send_event({"choices": [choice]})
        calls, self.server.calls = self.server.calls, []
        for index, (name, arguments) in enumerate(calls):
            made = {"index": index, "id": f"call-{len(self.server.asked)}-{index}", "type": "function"}
            head = {**made, "function": {"name": name, "arguments": ""}}
            rest = {"index": index, "function": {"arguments": json.dumps(arguments)}}
            for call in (head, rest):
                self.send_event({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]})
        if searches and self.server.cites:
            told = {"annotations": [{"type": "url_citation", "url_citation": one} for one in self.server.cites]}
            self.send_event({"choices": [{"index": 0, "delta": told, "finish_reason": None}]})
        reason = "tool_calls" if calls else "stop"
        self.send_event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {"prompt_tokens": count_tokens(asked), "completion_tokens": count}
        self.send_event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def allowed(self) -> bool:
        if self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self.send_json({"error": {"message": "no API key"}}, 401)
        return False

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        if self.server.ignored:
            self.send_header("x-moesaic-ignored", self.server.ignored)
        self.end_headers()

    def send_event(self, content: Any) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
        self.wfile.flush()

    def send_json(self, content: Any, status: int = 200) -> None:
        self.send_body(json.dumps(content).encode(), "application/json", status)

    def send_body(self, body: bytes, kind: str, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s?\w+|\s+|.", text, re.DOTALL)


def count_tokens(asked: dict[str, Any]) -> int:
    """Of a prompt, or of messages with two more for each."""
    if "prompt" in asked:
        return len(tokens_of(asked["prompt"]))
    return sum(2 + len(tokens_of(message.get("content") or "")) for message in asked["messages"])


def token_info(text: str, share: float) -> dict[str, Any]:
    return {"token": text, "logprob": math.log(share), "bytes": list(text.encode())}


SAMPLE = """Each **expert** is a small feed-forward network, and a *router* picks a few of them for every token:

1. The router scores all experts.
2. The best two are run, and their results are added.
   - Work stays small although the model is large.
   - Different tokens take different paths.

```python
def route(x, experts, k=2):
    \"\"\"Send one token to its k best experts.\"\"\"
    scores = x @ experts.keys.T      # one number each
    best = scores.topk(k)
    return sum(w * experts[i](x) for w, i in zip(best.values, best.indices))
```

| model | experts | active |
|---|---:|---:|
| Mixtral | 8 | 2 |
| GLM-4.5 | 160 | 8 |

> Only the chosen experts cost anything: `route` never runs the rest. See https://example.org/moe for more.
"""

if __name__ == "__main__":
    looking = ScriptedServer(8123)
    looking.answer, looking.reasoning, looking.pause = SAMPLE, "The user asks about experts. Keep it short.", 0.02
    print(f"The page is at {looking.url}. Ctrl-C ends it.")
    looking.serve_forever()
