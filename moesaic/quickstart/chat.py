"""Serve the finished model: on a terminal until Ctrl-C, otherwise until one request was answered."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape

import moesaic
from moesaic.data.tasks import score
from moesaic.evaluate.suites.tasks import held_out
from moesaic.quickstart.check import check
from moesaic.serve.api.server import Server, listen, serve
from moesaic.serve.api.service import Service, Settings

NAME = "quickstart"


def serve_finished(model: Path, family: str, port: int, console: Console, *, person: bool) -> None:
    """`person`: somebody is at the terminal; else the server is checked with one request of our own, and stops."""
    question = held_out(family, 1)[0]
    listener = listen("127.0.0.1", port if person else 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    engine = moesaic.Engine(moesaic.load(model), seed=0)
    problems: list[BaseException] = []

    async def request_once(server: Server) -> None:
        try:
            found = await asyncio.to_thread(check, url, NAME, question.question.strip())
            right = "right" if score(question, found["answer"]) >= 1.0 else "wrong"
            console.print(f"Request to the server: {escape(question.question.strip())}", soft_wrap=True)
            console.print(f"Response ({right}): {escape(found['answer'])}", soft_wrap=True)
        except Exception as error:
            problems.append(error)
        finally:
            server.should_exit = True

    tasks: list[asyncio.Task[None]] = []

    def ready(server: Server, service: Service) -> None:
        if not person:
            tasks.append(asyncio.get_running_loop().create_task(request_once(server)))
            return
        console.print(f"\nChat with it: [bold]{url}[/bold]   (Ctrl-C stops the server)\n")
        for name, text in (
            ("Ask it", question.question.strip()),
            ("In a terminal", f"moesaic chat {shlex.quote(str(model))}"),
            ("A real model", "moesaic convert smollm2 out/smollm2 && moesaic serve out/smollm2"),
        ):
            console.print(f"  {name:14}{escape(text)}", soft_wrap=True)

    asyncio.run(serve(engine, Settings(name=NAME), listener, drain_seconds=5, ready=ready))
    if problems:
        raise problems[0]
