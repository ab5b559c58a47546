"""A knowledge base of one's own texts: build it, search it, ask it, look into it, remove from it.

moesaic know build docs --out out/kb
moesaic know search out/kb "how is a citation checked?"
moesaic know ask out/kb "how is a citation checked?" --model out/smollm2
moesaic know show out/kb
moesaic know remove out/kb docs/LOG.md
moesaic know demo
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moesaic.cli import know_ask
from moesaic.cli.app import JsonFlag, print_json, stopped
from moesaic.cli.know_demo import demo
from moesaic.cli.options import out_directory
from moesaic.cli.progress import progress_bar
from moesaic.units import readable_bytes

if TYPE_CHECKING:
    from moesaic.know.build import Built
    from moesaic.know.graph.model import ModelExtractor

ORDER = 75

command = typer.Typer(help="A knowledge base of one's own texts: build it, search it, ask it.")
Base = Annotated[Path, typer.Argument(metavar="KB", help="The directory of the knowledge base.")]
PATHS = "Files and folders: text, Markdown, reStructuredText, HTML, PDF, JSON records; zip and tar archives of these."
command.command()(demo)
MOST_LINES = 10  # about files that were left out

command.command()(know_ask.ask)
command.command()(know_ask.search)


@command.command()
def build(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help=PATHS)],
    out: Annotated[Path, out_directory("Directory of the knowledge base; one that is there is brought up to date.")],
    embed: Annotated[
        Path | None,
        typer.Option("--embed", metavar="DIR", help="An embedding model: the base is searched by vectors too."),
    ] = None,
    embed_bits: Annotated[
        Literal["8", "32"] | None,
        typer.Option("--embed-bits", help="Of the embedding model's matrices; 8, the default, is twice as fast."),
    ] = None,
    extract: Annotated[
        Literal["patterns", "model", "none"] | None,
        typer.Option("--extract", help="What reads entities and triples out of the chunks; default: patterns."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR|URL", help="With --extract model: a model, or a server, that reads them."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep documents whose files are gone from the folders named here.")
    ] = False,
    compact: Annotated[
        bool, typer.Option("--compact", help="Merge all segments into one, and drop what was deleted.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Index texts, or bring an index up to date: what did not change costs a hash.

    Killed or stopped at any moment, the base is what it was, and the same command finishes the work.
    """
    from moesaic.know.build import build
    from moesaic.know.parts import Asked

    extractor = _extractor(model, out) if extract == "model" else None
    asked = Asked(embed, None if embed_bits is None else int(embed_bits), extract=extract, extractor=extractor)
    try:
        with progress_bar(disable=json) as progress:
            if extractor is not None:
                extractor.report = partial(progress, "extracting")
            built = build(paths, out, asked=asked, keep=keep, compact=compact, progress=progress)
    except KeyboardInterrupt:
        raise stopped("know build", out, resumable=True) from None
    _report(built, out, json)


def _extractor(model: str | None, out: Path) -> ModelExtractor:
    """A model as a reader of chunks; what it read is kept in the base, so that a build that was killed goes on."""
    from moesaic.errors import UserError
    from moesaic.know.answer.writers import EngineWriter, ServerWriter
    from moesaic.know.graph.model import ModelExtractor
    from moesaic.know.store.directory import EXTRACTED

    if model is None:
        raise UserError("--extract model", "needs a model that reads the chunks", "Name it: --model DIR, or a URL.")
    if model.startswith(("http://", "https://")):
        server = ServerWriter(model)
        return ModelExtractor(server, server.client.model_name(), out / EXTRACTED)
    return ModelExtractor(EngineWriter.open(model), Path(model).resolve().name, out / EXTRACTED)


@command.command()
def show(base: Base, json: JsonFlag = False) -> None:
    """Show the documents of a knowledge base."""
    from moesaic.know.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(base) as opened:
        documents = list(opened.documents())
        size = sum(file.stat().st_size for file in base.rglob("*") if file.is_file())
        if json:
            listed = [
                {"source": d.source, "title": d.title, "id": d.id, "file": d.file, "bytes": d.bytes, "chunks": d.chunks}
                for d in documents
            ]
            parts = opened.manifest.parts
            segments = len(opened.segments)
            print_json(
                {
                    "directory": base, "documents": listed, "chunks": opened.chunk_count, "bytes": size,
                    "segments": segments, "parts": parts,
                }
            )  # fmt: skip
            return
        for document in documents:
            named = f"  {document.title}" if document.title != Path(document.source).stem else ""
            print(f"{document.source}  {document.chunks} chunks{named}")
        count = f"{len(documents)} documents, {opened.chunk_count} chunks"
        print(f"{base}: {count}, {readable_bytes(size)} on disk, searched by {', '.join(opened.manifest.parts)}.")


@command.command()
def remove(
    base: Base,
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="As `know show` lists them, or a folder of them.")
    ],
    json: JsonFlag = False,
) -> None:
    """Remove documents from a knowledge base."""
    from moesaic.know.build import remove

    _report(remove(base, sources), base, json)


def _report(built: Built, base: Path, json: bool) -> None:
    if json:
        print_json({"directory": base, **vars(built)})
        return
    counts = {"added": built.added, "changed": built.changed, "unchanged": built.unchanged, "removed": built.removed}
    for skipped in built.skipped[:MOST_LINES]:
        print(f"skipped {skipped}")
    if len(built.skipped) > MOST_LINES:
        print(f"skipped {len(built.skipped) - MOST_LINES} more; --json lists all")
    print(", ".join(f"{count} {what}" for what, count in counts.items() if count) or "nothing to do", end=". ")
    print(f"{base} holds {built.documents} documents in {built.chunks} chunks.")
