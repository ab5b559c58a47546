"""Parallel context windows (Ratner et al. 2023): a long input as several windows, none of which sees another, each with
the positions from 0 on; what follows sees all of them, at positions after the longest. So the positions of a model's
trained context hold several times as much text, and windows cost attention of their own lengths only.

    prompt, windows = joined([first_tokens, second_tokens], task_tokens)
    request = engine.request(prompt, sampling, windows=windows)

In the KV cache the rows of all windows lie one after the other, as if they were one sequence: keys hold their
positions, and attention asks for no order. A window is computed from the next page boundary on, as a sequence of its
own, and moved up to the others when it is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from moesaic.errors import UserError
from moesaic.serve.core.sequence_states import refuse_request

if TYPE_CHECKING:
    from moesaic.serve.core.engine import Engine


@dataclass(frozen=True)
class Windows:
    """`ends[i]` is the place behind the last token of window i, in the prompt."""

    ends: tuple[int, ...]

    @property
    def total(self) -> int:
        return self.ends[-1]

    @property
    def longest(self) -> int:
        return max(stop - start for start, stop in pairwise((0, *self.ends)))

    def around(self, place: int) -> tuple[int, int] | None:
        """From where to where the window goes that a place is in; None behind all of them."""
        return next(((start, stop) for start, stop in pairwise((0, *self.ends)) if place < stop), None)

    def within(self, place: int, tokens: int) -> int:
        """As many of the next tokens as are in the same window."""
        around = self.around(place)
        return tokens if around is None else min(tokens, around[1] - place)

    def gap(self, place: int, page_size: int) -> int:
        """Rows that are left free before a window in progress, so that it begins with a page."""
        around = self.around(place)
        return 0 if around is None else -around[0] % page_size

    @property
    def prefix(self) -> int:
        """So many tokens see each other whatever their order."""
        return 0

    def position(self, place: int) -> int:
        """Of a token: in its window, or behind all windows."""
        around = self.around(place)
        return place - self.total + self.longest if around is None else place - around[0]

    def closing_gap(self, computed: int, pages: Sequence[int], size: int) -> tuple[list[int], list[int]] | None:
        """Where a window that has just been completed lies, and where it is to be: rows numbered through all pages."""
        ended = next(((start, stop) for start, stop in pairwise((0, *self.ends)) if stop == computed), None)
        if ended is None or not (gap := self.gap(ended[0], size)):
            return None

        def rows(places: range) -> list[int]:
            return [pages[place // size] * size + place % size for place in places]

        return rows(range(ended[0] + gap, ended[1] + gap)), rows(range(*ended))


def joined(contexts: Sequence[Sequence[int]], task: Sequence[int]) -> tuple[list[int], Windows]:
    """The prompt of some contexts and a task that sees all of them."""
    if not contexts or not all(contexts):
        raise UserError("parallel_contexts", "holds an empty text" if contexts else "is empty", "Leave it out.")
    ends = tuple(accumulate(len(one) for one in contexts))
    return [token for context in contexts for token in context] + list(task), Windows(ends)


def max_tokens_over(engine: Engine, prompt: Sequence[int], windows: Windows) -> int:
    """How many tokens a request over windows may have, or why the engine cannot serve it."""
    config, where = engine.model.config, "parallel_contexts"
    if any(layer.window is not None for layer in config.layers):
        problem = "the model has sliding windows, which count rows of the cache and would cut the text apart otherwise"
        raise UserError(where, problem, "Leave it out.")
    if getattr(config.attention, "indexer", None) is not None:
        raise UserError(
            where, "the model selects what it attends to (DSA) by its place in one sequence", "Leave it out."
        )
    refuse_request(config, where, "it would have read all windows as one text")
    if config.rope.kind == "dynamic":
        raise UserError(where, "the model's rotary frequencies depend on the length of a sequence", "Leave it out.")
    if not getattr(getattr(engine, "runner", None), "takes_windows", False):
        problem = "only an engine that runs layer by layer in the server's own process has positions that repeat"
        raise UserError(where, problem, "Serve on a CPU, without --replicas or --layout.")
    if engine.page_pool.store is not None:
        raise UserError(where, "a KV policy would prune windows as one sequence", "Leave --kv-policy out.")
    task, size = len(prompt) - windows.total, engine.page_pool.size
    if task < 1:
        raise UserError("prompt", "is empty", "Say what is asked about the contexts.")
    if windows.longest + task >= config.context:
        problem = (
            f"the longest has {windows.longest} tokens and the prompt {task}; the model's context is {config.context}"
        )
        raise UserError(where, problem, "Make more windows of it, shorter ones.")
    rows = (engine.cache.pages - 1) * size
    if len(prompt) >= rows:
        raise UserError(where, f"have {len(prompt)} tokens, and the KV cache holds {rows}", "Raise --cache-gb.")
    return min(rows, windows.total + config.context - windows.longest)
