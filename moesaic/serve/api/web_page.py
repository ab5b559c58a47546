"""The web page at `/`, and the files it is made of.

Its content security policy allows scripts, styles and fonts of this server only, and requests to this server only:
should text of a model ever get into the page as markup, it could neither run nor tell anyone. MCP servers, whose tools
the page may call, have origins of their own; whoever runs the server names those that the page may talk to
(`--mcp ORIGIN`).
"""

from __future__ import annotations

import mimetypes
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel

from moesaic.errors import UserError

FOLDER = Path(__file__).parent.parent / "web"
KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".woff2": "font/woff2"}


class PageSettings(BaseModel):
    mcp_origins: list[str]
    know: list[str]  # names of the knowledge bases


def files() -> dict[str, Path]:
    """What is served, by path."""
    found = {
        f"/{file.relative_to(FOLDER).as_posix()}": file
        for file in sorted(FOLDER.rglob("*"))
        if file.is_file() and not file.name.startswith(".")
    }
    return found | ({"/": found["/index.html"]} if "/index.html" in found else {})


def paths() -> frozenset[str]:
    return frozenset(files())


def kind(file: Path) -> str:
    """The media type: this machine's own table may lack some, or have others."""
    known = "text/plain" if file.name == "LICENSE" else mimetypes.guess_type(file.name)[0]
    return KINDS.get(file.suffix) or known or "application/octet-stream"


def origins(given: Iterable[str]) -> tuple[str, ...]:
    """Of MCP servers, checked: they become part of a header."""
    checked = []
    for one in given:
        parts = urlsplit(one)
        plain = f"{parts.scheme}://{parts.netloc}"
        if parts.scheme not in ("http", "https") or one.rstrip("/") != plain or not _host(parts.netloc):
            raise UserError("--mcp", f"{one!r} is no origin", "Give one such as http://127.0.0.1:9000, without a path.")
        checked.append(plain)
    return tuple(checked)


def _host(netloc: str) -> bool:
    return bool(netloc) and all(character.isalnum() or character in ".-:[]" for character in netloc)


def policy(mcp_origins: Sequence[str] = ()) -> str:
    """The content security policy of the page."""
    rules = {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "font-src": ["'self'"],
        "img-src": ["'self'"],
        "connect-src": ["'self'", *mcp_origins],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
        "frame-ancestors": ["'none'"],
        "require-trusted-types-for": ["'script'"],
        "trusted-types": ["'none'"],
    }
    return "; ".join(" ".join([name, *values]) for name, values in rules.items())


def headers(mcp_origins: Sequence[str] = ()) -> dict[str, str]:
    return {
        "cache-control": "no-cache",
        "content-security-policy": policy(mcp_origins),
        "cross-origin-opener-policy": "same-origin",
        "permissions-policy": "camera=(), microphone=(), geolocation=()",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
    }


def router(mcp_origins: Sequence[str] = (), know: Iterable[str] = ()) -> APIRouter:
    """One route for each file: a mount at `/` would answer requests for unknown routes, and not with our errors."""
    routes = APIRouter(include_in_schema=False)
    sent = headers(mcp_origins)

    def add(path: str, file: Path) -> None:
        @routes.get(path)
        async def send(request: Request) -> Response:
            found = file.stat()
            named = {**sent, "etag": f'"{found.st_mtime_ns:x}-{found.st_size:x}"'}
            if request.headers.get("if-none-match") == named["etag"]:
                return Response(status_code=304, headers=named)  # the browser has it
            return FileResponse(file, headers=named, media_type=kind(file))

    for path, file in files().items():
        add(path, file)

    @routes.get("/page.json")
    async def page_settings() -> PageSettings:
        """What the page cannot know of itself."""
        return PageSettings(mcp_origins=list(mcp_origins), know=list(know))

    return routes
