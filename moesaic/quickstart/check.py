"""Check a served model: one request as an API client sends it, the web page, and the request that page sends."""

from __future__ import annotations

import json
from typing import Any

import httpx


def check(url: str, model: str, question: str) -> dict[str, Any]:
    """The response; raises if anything fails."""
    with httpx.Client(base_url=url, timeout=60.0) as client:
        form = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
        response = client.post("/v1/chat/completions", json=form).raise_for_status().json()
        page = client.get("/").raise_for_status()
        streamed = ""
        with client.stream("POST", "/v1/chat/completions", json=form | {"stream": True}) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if line.startswith("data:") and "[DONE]" not in line:
                    for choice in json.loads(line.removeprefix("data:")).get("choices", ()):
                        streamed += choice.get("delta", {}).get("content") or ""
    text = response["choices"][0]["message"]["content"]
    if streamed != text:
        raise RuntimeError(f"streamed {streamed!r}, and not streamed {text!r}")
    return {"question": question, "answer": text, "page_bytes": len(page.content)}
