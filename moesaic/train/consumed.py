"""How far a learning-rate schedule is: in steps, or in what steps have consumed where they are not of one size.

Random-LTD counts layer-tokens, and a length warm-up that shrinks batches counts tokens ("The Stability-Efficiency
Dilemma"): in steps, the rate would be past much of its decay when most of the text is still to come. `train.tokens`
gives the length of a run in tokens too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

from moesaic.data.stream import batch_share
from moesaic.recipe import Recipe


class Consumed:
    """`costs` say what a step consumes, as a share of a full one; none where all are full."""

    def __init__(self, steps: int, warmup: int, costs: list[Callable[[int], float]]) -> None:
        self.warmup = warmup
        self.done: list[float] | None = None  # share of what is consumed after warm-up that lies before each step
        if costs:
            each = []
            for step in range(warmup, steps):
                each.append(1.0)
                for cost in costs:
                    each[-1] *= cost(step)
            so_far = [0.0, *accumulate(each)]
            self.done = [share / so_far[-1] for share in so_far[:-1]]

    @classmethod
    def of(cls, recipe: Recipe, layer_cost: Callable[[int], float] | None, *, text: bool) -> Consumed:
        """Of a run, on text or on a stage's stream, whose batches are not the recipe's."""
        costs = [layer_cost, token_cost(recipe) if text else None]
        settings = recipe.train
        return cls(settings.steps, settings.warmup_steps, [cost for cost in costs if cost is not None])

    def place(self, step: int) -> int:
        """The step whose learning rate a step has."""
        if self.done is None or step < self.warmup:
            return step
        return self.warmup + int(self.done[step - self.warmup] * len(self.done))


def token_cost(recipe: Recipe) -> Callable[[int], float] | None:
    """Tokens of a step, as a share of a full batch, where the schedule counts them."""
    warmup = recipe.data.length_warmup
    if warmup is None or warmup.batch == "same" or not warmup.token_rate:
        return None
    return lambda step: batch_share(step, recipe)


def fit_tokens(recipe: Recipe) -> Recipe:
    """The recipe with as many steps as take its tokens, where it names them."""
    tokens = recipe.train.tokens
    if tokens is None:
        return recipe
    size, warmup = recipe.train.batch_tokens, recipe.data.length_warmup
    early = [round(size * batch_share(step, recipe)) for step in range(warmup.steps if warmup is not None else 0)]
    so_far = list(accumulate(early))
    missing = tokens - (so_far[-1] if so_far else 0)
    steps = len(early) + -(-missing // size) if missing > 0 else bisect_right(so_far, tokens - 1) + 1
    return recipe.changed(train={"steps": steps})
