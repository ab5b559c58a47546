"""Which tokens spell a piece of text.

One step may bring the end of a thought, the mark behind it and the first words of the answer, and a parser may hold a
piece back until it knows what it is.
"""

from __future__ import annotations

from typing import Any

Item = dict[str, Any]  # a token's `TokenInfo`


class TokenTrail:
    """Tokens that have come and of which no piece was taken yet."""

    def __init__(self) -> None:
        self._left: list[tuple[bytes, Item | None]] = []  # None: what is left of a token that was given already

    def add(self, tokens: list[Item]) -> None:
        self._left += [(bytes(token["bytes"] or ()), token) for token in tokens]

    def take(self, text: str, last: bool) -> tuple[list[Item], list[Item]] | None:
        """The tokens before a piece and those of it; None where no tokens spell it, as with broken characters.

        The `last` piece of a step is looked for at the end, where it is unless something is held back: its words may
        stand in what came before as well.
        """
        raw, piece = b"".join(part for part, _ in self._left), text.encode()
        begin = len(raw) - len(piece) if last and raw.endswith(piece) else raw.find(piece)
        if begin < 0:
            return None
        end, at = begin + len(piece), 0
        before: list[Item] = []
        mine: list[Item] = []
        left: list[tuple[bytes, Item | None]] = []
        for part, token in self._left:
            start, at = at, at + len(part)
            if start >= end:
                left.append((part, token))
                continue
            if token is not None:
                (before if at <= begin else mine).append(token)
            if at > end:
                left.append((part[end - start :], None))
        self._left = left
        return before, mine

    def rest(self) -> list[Item]:
        found, self._left = [token for _, token in self._left if token is not None], []
        return found
