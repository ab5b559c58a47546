"""The proxies of RegMix: small runs with random weights of the sources, or of the topics, and the mixture they tell of.

found = find_mixture(load_recipe("recipes/topics.yaml"), Path("out/mix"), proxies=24, steps=60)
print(found.snippet())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.data.mixture import make_plan
from moesaic.data.mixture_regression import draw_weights, fit, recommend
from moesaic.data.preparation.prepare import Status
from moesaic.data.stream import TokenStream
from moesaic.recipe import Recipe
from moesaic.recipe_sections import PhaseSection
from moesaic.train.law.loss_law import write_json
from moesaic.train.proxies import Proxies

RESULT = "mixture.json"


@dataclass(frozen=True)
class Mixture:
    weights: dict[str, float]  # recommended
    as_it_comes: dict[str, float]  # the share of tokens of each
    predicted: float  # loss of a proxy with these weights
    predicted_as_it_comes: float
    error: float  # of predictions of losses that were left out of the regression: root mean square
    rank: float  # their rank correlation with the losses
    form: str
    proxies: list[dict[str, Any]]  # weights and loss of each
    mix_by: str | None

    def text(self) -> str:
        width = max(map(len, self.weights))
        lines = [f"{'':<{width}}  share of tokens  recommended"]
        for name, weight in sorted(self.weights.items(), key=lambda item: -item[1]):
            lines.append(f"{name:<{width}}  {self.as_it_comes[name]:>15.1%}  {weight:>11.1%}")
        lines.append(
            f"predicted loss {self.predicted:.4f}, with the share of tokens {self.predicted_as_it_comes:.4f}; of"
            f" {len(self.proxies)} proxies' losses each left out is predicted to {self.error:.4f}, rank correlation"
            f" {self.rank:.2f}"
        )
        if self.predicted_as_it_comes - self.predicted < self.error:
            lines.append("The gain is below that error: train more proxies, or longer ones, before you believe it.")
        return "\n".join(lines)

    def snippet(self) -> str:
        """The recommended mixture as it stands in a recipe."""
        weights = ", ".join(f"{name}: {weight:g}" for name, weight in self.weights.items())
        by = [f"  mix_by: {self.mix_by}"] if self.mix_by else []
        return "\n".join(["data:", *by, "  phases:", f"    - {{share: 1.0, weights: {{{weights}}}}}"])


def find_mixture(
    recipe: Recipe,
    out: Path,
    *,
    proxies: int = 24,
    steps: int = 60,
    on: str | None = None,
    tokens: int = 65_536,
    max_epochs: float = 4.0,
    on_status: Callable[[Status], None] = lambda status: None,
    log: Callable[[str], None] = lambda text: None,
) -> Mixture:
    """Train proxies with random weights, and read their losses. `max_epochs` is of the recipe's own run."""
    run_tokens = recipe.train.steps * recipe.train.batch_tokens
    mix_by, seed = recipe.data.mix_by, recipe.train.seed
    small = Proxies(recipe, out, steps=steps, on=on, tokens=tokens, on_status=on_status, log=log)
    small.total = steps * proxies
    trained = ~small.data.held_out
    counts = np.bincount(small.data.domain[trained], small.data.lengths[trained], minlength=len(small.data.domains))
    tokens_G = np.array([counts[small.data.domains.index(name)] for name in small.names])
    weights_NG = draw_weights(tokens_G, proxies, seed)
    losses = []
    for number, weights_G in enumerate(weights_NG):
        stream = _stream(small, dict(zip(small.names, weights_G.tolist(), strict=True)))
        losses.append(small.loss(stream, f"mixture {number}", seed))
    fitted = fit(weights_NG, np.array(losses))
    best_G = recommend(fitted, tokens_G, run_tokens=run_tokens, max_epochs=max_epochs, seed=seed)
    share_G = tokens_G / tokens_G.sum()
    found = Mixture(
        weights={name: round(weight, 4) for name, weight in zip(small.names, best_G.tolist(), strict=True)},
        as_it_comes=dict(zip(small.names, share_G.tolist(), strict=True)),
        predicted=float(fitted.predict(best_G[None])[0]),
        predicted_as_it_comes=float(fitted.predict(share_G[None])[0]),
        error=fitted.error,
        rank=fitted.rank,
        form=fitted.form,
        proxies=[{"weights": row.tolist(), "loss": loss} for row, loss in zip(weights_NG, losses, strict=True)],
        mix_by=mix_by,
    )
    write_json(out / RESULT, asdict(found))
    return found


def _stream(small: Proxies, weights: dict[str, float]) -> TokenStream:
    train = small.recipe.train
    section = small.section.model_copy(update={"phases": (PhaseSection(share=1.0, weights=weights),)})
    plan = make_plan(small.data, section, tokens=small.steps * train.batch_tokens)
    length = section.sequence_length
    return TokenStream(small.data, plan, batch_tokens=train.batch_tokens, sequence_length=length)
