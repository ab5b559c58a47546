"""The one error a user can cause: what was wrong, where, and what to do about it.

The command line prints it and exits with 2, the server answers it as HTTP 400; anything else is our own mistake.
"""

from __future__ import annotations


class UserError(Exception):
    """A wrong request. `place` names the file, key or argument; `problem` says what is wrong; `remedy` the way out."""

    def __init__(self, place: object, problem: str, remedy: str = "") -> None:
        self.place = str(place)
        self.problem = problem
        self.remedy = remedy
        super().__init__(str(self))

    def __str__(self) -> str:
        head = f"{self.place}: {self.problem}" if self.place else self.problem
        return f"{head}{'' if head.endswith(('.', '?', '!')) else '.'} {self.remedy}" if self.remedy else head

    def __reduce__(self) -> tuple[type[UserError], tuple[str, str, str]]:
        """Whole on its way from one process to another."""
        return type(self), (self.place, self.problem, self.remedy)
