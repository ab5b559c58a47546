"""Calls of which only what follows the opening tag shows how they are written."""

from __future__ import annotations

from collections.abc import Callable

from moesaic.serve.parsers._events import Body


class EitherBody(Body):
    """`choose` says which body reads a text that begins with the opening tag; None: it needs more."""

    def __init__(self, choose: Callable[[str], Body | None]) -> None:
        super().__init__()
        self.choose = choose
        self.pending = ""
        self.chosen: Body | None = None

    def push(self, text: str) -> None:
        if self.chosen is None:
            self.pending += text
            self.chosen = self.choose(self.pending)
            text = self.pending
        if self.chosen is not None:
            self.chosen.push(text)
            self._follow(self.chosen)

    def finish(self) -> None:
        if self.chosen is not None:
            self.chosen.finish()
            self._follow(self.chosen)

    def _follow(self, body: Body) -> None:
        self.name, self.id, self.ended, self.broken = body.name, body.id, body.ended, body.broken
        self.rest, self.following = body.rest, body.following
        self.arguments, body.arguments = self.arguments + body.arguments, ""
