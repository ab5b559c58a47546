"""Serve the finished model: for a person until Ctrl-C, otherwise until it has answered for itself."""

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


def talk(model: Path, family: str, port: int, console: Console, *, person: bool) -> None:
    question = held_out(family, 1)[0]
    listener = listen("127.0.0.1", port if person else 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    engine = moesaic.Engine(moesaic.load(model), seed=0)
    problems: list[BaseException] = []

    async def by_itself(server: Server) -> None:
        try:
            found = await asyncio.to_thread(check, url, NAME, question.question.strip())
            right = "right" if score(question, found["answer"]) >= 1.0 else "wrong"
            asked = "Asked through the API, and as the page asks:"
            console.print(f"{asked} {escape(question.question.strip())}", soft_wrap=True)
            console.print(f"Answered ({right}): {escape(found['answer'])}", soft_wrap=True)
        except Exception as error:
            problems.append(error)
        finally:
            server.should_exit = True

    asking: list[asyncio.Task[None]] = []

    def ready(server: Server, service: Service) -> None:
        if not person:
            asking.append(asyncio.get_running_loop().create_task(by_itself(server)))
            return
        console.print(f"\nTalk to it: [bold]{url}[/bold]   (Ctrl-C ends)\n")
        for name, text in (
            ("Ask it", question.question.strip()),
            ("In a terminal", f"moesaic chat {shlex.quote(str(model))}"),
            ("A real model", "moesaic convert smollm2 out/smollm2 && moesaic serve out/smollm2"),
        ):
            console.print(f"  {name:14}{escape(text)}", soft_wrap=True)

    asyncio.run(serve(engine, Settings(name=NAME), listener, drain_seconds=5, ready=ready))
    if problems:
        raise problems[0]
