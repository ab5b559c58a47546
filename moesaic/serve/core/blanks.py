"""Blanks in a prompt (GLM): the text before the first <sop> is seen both ways, and what is written into a blank has the
positions that follow its mask.

    moesaic chat out/filler              "The capital of [MASK] is Paris." or "Once upon a time"

A prompt without <sop> gets one, and where it has no mask either, first the mask for the rest of a text: an ordinary
prompt is continued. The text is computed at once, however long it is, since every token of it sees all others; and for
the same reason its pages are nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import UserError
from moesaic.model.config import Infilling, ModelConfig
from moesaic.serve.core.context_windows import Windows


@dataclass(frozen=True)
class Blanks(Windows):
    """A window that later tokens see like any other text; `moved[i]` is the position of token `total + i`."""

    moved: tuple[int, ...] = ()

    @property
    def prefix(self) -> int:
        return self.total

    def around(self, place: int) -> tuple[int, int] | None:
        return None

    def within(self, place: int, tokens: int) -> int:
        """All of the text together."""
        return max(tokens, self.total - place)

    def position(self, place: int) -> int:
        behind = place - self.total
        if behind < 0:
            return place
        last = len(self.moved) - 1
        return self.moved[behind] if behind <= last else self.moved[last] + behind - last


def with_blanks(prompt: Sequence[int], infilling: Infilling) -> tuple[list[int], Blanks]:
    """The prompt as the model was trained on it."""
    start, masks, tokens = infilling.start, infilling.masks, list(prompt)
    if start not in tokens:
        tokens += [start] if set(masks) & set(tokens) else [masks[-1], start]
    total = tokens.index(start)
    places = [place for place in range(total) if tokens[place] in masks]
    if tokens.count(start) > len(places):
        problem = f"fills {tokens.count(start)} blanks and has {len(places)}"
        raise UserError("prompt", problem, "Put a mask ([MASK], [gMASK]) where each blank is.")
    moved: list[int] = []
    for token in tokens[total:]:
        moved.append(places.pop(0) if token == start else moved[-1] + 1)
    return tokens, Blanks((total,), tuple(moved))


def check_blanks(config: ModelConfig, *, takes_windows: bool, prunes: bool) -> None:
    """Whether an engine can serve them."""
    if not takes_windows:
        problem = "fills blanks, for which an engine must run layer by layer in the server's own process"
        raise UserError("model", problem, "Serve it on a CPU, without --replicas or --layout.")
    if prunes:
        raise UserError("--kv-policy", "would prune a text that is seen both ways", "Leave it out.")
    if any(layer.window is not None for layer in config.layers):
        raise UserError("model", "has sliding windows, which no blank has been tried with", "Serve another model.")
