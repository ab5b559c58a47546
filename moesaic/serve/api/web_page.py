"""The web page at `/`, and the files it is made of."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent.parent / "web"


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


def router() -> APIRouter:
    """One route for each file: a mount at `/` would answer requests for unknown routes, and not with our errors."""
    routes = APIRouter(include_in_schema=False)

    def add(path: str, file: Path) -> None:
        @routes.get(path)
        async def send() -> FileResponse:
            return FileResponse(file, headers={"cache-control": "no-cache", "x-content-type-options": "nosniff"})

    for path, file in files().items():
        add(path, file)
    return routes
