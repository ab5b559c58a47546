"""`moesaic know ask` and `moesaic know search`: answers with citations, or the passages themselves."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.app import JsonFlag, print_json
from moesaic.cli.options import KeyVariable
from moesaic.errors import UserError

if TYPE_CHECKING:
    from moesaic.know.answer.answer import Answer
    from moesaic.know.answer.choose import Passage
    from moesaic.know.answer.writer import Writer

Base = Annotated[Path, typer.Argument(metavar="KB", help="The directory of the knowledge base.")]
Question = Annotated[str, typer.Argument(metavar="QUESTION", help="What is asked, in quotation marks.")]
Method = Annotated[str, typer.Option(help="How it is searched: auto, words, vectors, fusion or mutual.")]
AskMethod = Annotated[
    str, typer.Option(help="How it is searched: auto, words, vectors, fusion or mutual; or solve: step by step.")
]
SHOWN = 160  # characters of a passage that was read in vain
Passages = Annotated[int, typer.Option("-k", "--passages", min=1, max=50, help="Passages to show, at most.")]


def search(
    base: Base, query: Question, passages: Passages = 5, method: Method = "auto", json: JsonFlag = False
) -> None:
    """Search a knowledge base: the best passages, each with the sentence that says most of what is asked."""
    from moesaic.know.answer.answering import quotes
    from moesaic.know.knowledge_base import KnowledgeBase

    with KnowledgeBase.open(base) as opened:
        hits = opened.search(query, max(2 * passages, 8), method)
        found = quotes(query, hits, passages)
    scores = {hit.chunk.id: hit for hit in hits}
    if json:
        listed = [
            {
                **described(passage, quote, start, end),
                "text": passage.chunk.text,
                "score": scores[passage.chunk.id].score,
            }
            for passage, quote, start, end in found
        ]
        print_json({"directory": base, "query": query, "passages": listed})
        return
    show_quotes(found)


def ask(
    base: Base,
    question: Question,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="The model that answers.")] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="Or a server, OpenAI-compatible.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the server's model; default: its first.")] = None,
    rounds: Annotated[int, typer.Option(min=0, max=8, help="Rounds of follow-up questions before the answer.")] = 0,
    quote: Annotated[bool, typer.Option("--quote", help="Answer with a sentence of the texts, word for word.")] = False,
    passages: Passages = 5,
    method: AskMethod = "auto",
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Same seed, same answer.")] = 0,
    api_key_env: KeyVariable = None,
    json: JsonFlag = False,
) -> None:
    """Answer a question from a knowledge base, with citations that were checked against their passages.

    Without --model or --url it shows the best passages.
    """
    from moesaic.know.answer.answering import Answerer
    from moesaic.know.answer.follow_up import FollowUp
    from moesaic.know.answer.retrieval import ByMethod
    from moesaic.know.knowledge_base import KnowledgeBase

    if model is not None and url is not None:
        raise UserError("--url", "stands beside --model", "Name one of them: who is to answer?")
    if method == "solve":
        if rounds:
            raise UserError("--rounds", "solve asks no follow-up questions", "Leave one of the two out.")
        solve(base, question, writer_of(model, url, name, api_key_env) if model or url else None, json)
        return
    if model is None and url is None:
        if rounds:
            raise UserError("--rounds", "needs a model that asks the questions", "Add --model DIR or --url URL.")
        search(base, question, passages, method, json)
        return
    with KnowledgeBase.open(base) as opened:
        writer = writer_of(model, url, name, api_key_env)
        retriever = ByMethod(opened, method)
        answerer = Answerer(retriever, writer, passages, max(16, 2 * passages), temperature, seed, quote)
        answer = FollowUp(answerer, rounds).answer(question) if rounds else answerer.answer(question)
    if json:
        print_json({"directory": base, **answer.record()})
    else:
        show_answer(answer)


def solve(base: Path, question: str, writer: Writer | None, json: bool) -> None:
    """By logical forms: the steps, what each found and where, and the answer. A question in plain words about facts of
    the graph needs no model."""
    from moesaic.know.answer.untrusted import printable
    from moesaic.know.knowledge_base import KnowledgeBase
    from moesaic.know.solver.solve import Solver

    with KnowledgeBase.open(base) as opened:
        solved = Solver(opened, writer).ask(question)
    if json:
        print_json({"directory": base, **solved.record()})
        return
    for line in str(solved).splitlines():
        print(printable(line))


def writer_of(model: Path | None, url: str | None, name: str | None, api_key_env: str | None) -> Writer:
    from moesaic.know.answer.writers import EngineWriter, ServerWriter
    from moesaic.serve.bench.load import check_address

    if url is None:
        assert model is not None
        return EngineWriter.open(model)
    check_address(url)
    key = os.environ.get(api_key_env) if api_key_env else None
    if api_key_env and not key:
        raise UserError("--api-key-env", f"the environment has no {api_key_env}", "Set it to the server's key.")
    return ServerWriter(url, name, key)


def show_answer(answer: Answer) -> None:
    """What documents say is shown without control characters, with which they could take over a terminal."""
    from moesaic.know.answer.untrusted import printable

    for one in answer.rounds:
        print(printable(f"{one.number}. {one.query}  →  {one.answer}"))
    print(printable(answer.text))
    if answer.abstained:
        print(printable(f"  ({answer.why_not})"))
        for passage in answer.passages:  # which may hold it all the same
            shown = " ".join(passage.shown.split())
            print(printable(f"  read: {passage.chunk.source}: “{shown[:SHOWN]}{'…' if len(shown) > SHOWN else ''}”"))
        return
    for citation in answer.citations:
        print(
            printable(f"  [{citation.number}] {citation.source}, {citation.start}–{citation.end}: “{citation.quote}”")
        )
    for dropped in answer.dropped:
        moved = f"; [{dropped.moved_to}] has it" if dropped.moved_to is not None else ""
        cited = f"citation [{dropped.number}]" if dropped.number is not None else "no citation"
        print(printable(f"  dropped: {cited} of “{dropped.statement}” ({dropped.reason}{moved})"))


def show_quotes(found: Sequence[tuple[Passage, str, int, int]]) -> None:
    from moesaic.know.answer.answer import NOT_IN_TEXTS
    from moesaic.know.answer.untrusted import printable

    if not found:
        print(NOT_IN_TEXTS)
    for passage, quote, start, end in found:
        print(printable(f"[{passage.number}] {passage.chunk.title}  ({passage.chunk.source}, {start}–{end})"))
        print(printable(f"    {' '.join(quote.split())}"))


def described(passage: Passage, quote: str, start: int, end: int) -> dict[str, Any]:
    chunk = passage.chunk
    return {
        "number": passage.number, "source": chunk.source, "title": chunk.title, "chunk": chunk.id,
        "document": chunk.document, "quote": quote, "start": start, "end": end, "page": chunk.page,
    }  # fmt: skip
