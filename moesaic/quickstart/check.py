"""Talk to a served model without a person: one request as a client makes it, and what the page itself asks for."""

from __future__ import annotations

import json
from typing import Any

import httpx


def check(url: str, model: str, question: str) -> dict[str, Any]:
    """What came back; raises if anything did not."""
    with httpx.Client(base_url=url, timeout=60.0) as client:
        form = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 32, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=form).raise_for_status().json()
        page = client.get("/").raise_for_status()
        streamed = ""
        with client.stream("POST", "/v1/chat/completions", json=form | {"stream": True}) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if line.startswith("data:") and "[DONE]" not in line:
                    for choice in json.loads(line.removeprefix("data:")).get("choices", ()):
                        streamed += choice.get("delta", {}).get("content") or ""
    said = answer["choices"][0]["message"]["content"]
    if streamed != said:
        raise RuntimeError(f"the page would be told {streamed!r} where a client is told {said!r}")
    return {"question": question, "answer": said, "page_bytes": len(page.content)}
