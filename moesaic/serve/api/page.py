"""The page at `/`, and the files it is made of."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

FOLDER = Path(__file__).parent.parent / "web"


def router() -> APIRouter:
    """One route for each file: a mount at `/` would answer for every route there is not, and with the wrong words."""
    routes = APIRouter(include_in_schema=False)

    def add(path: str, file: Path) -> None:
        @routes.get(path)
        async def send() -> FileResponse:
            return FileResponse(file, headers={"cache-control": "no-cache", "x-content-type-options": "nosniff"})

    for file in sorted(FOLDER.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            add(f"/{file.relative_to(FOLDER).as_posix()}", file)
    if (FOLDER / "index.html").is_file():
        add("/", FOLDER / "index.html")
    return routes
