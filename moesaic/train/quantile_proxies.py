"""The proxies of Kaiyuan-2B's quantile data benchmarking: a small run on each slice of each source, then its loss.

report = run_proxies(load_recipe("recipes/tiny.yaml"), Path("out/quantiles"), steps=100)
print(report.table.text())
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moesaic.data.preparation.prepare import Status
from moesaic.data.quantiles import QuantileTable, benchmark_quantiles
from moesaic.data.stream import TokenStream
from moesaic.recipe import Recipe
from moesaic.train.law.loss_law import write_json
from moesaic.train.proxies import Proxies

RESULT = "quantiles.json"


@dataclass
class Quantiles:
    table: QuantileTable
    losses: dict[str, list[float]]  # by slice, one for each seed
    warnings: list[str] = field(default_factory=list)

    @property
    def noise(self) -> float | None:
        """How far the losses of one slice lie apart for nothing but the seed: their standard deviation, pooled."""
        spreads = [statistics.variance(losses) for losses in self.losses.values() if len(losses) > 1]
        return statistics.mean(spreads) ** 0.5 if spreads else None


def run_proxies(
    recipe: Recipe,
    out: Path,
    *,
    steps: int = 100,
    quantiles: int = 4,
    column: str = "quality",
    on: str | None = None,
    seeds: int = 1,
    tokens: int = 65_536,
    on_status: Callable[[Status], None] = lambda status: None,
    log: Callable[[str], None] = lambda text: None,
) -> Quantiles:
    """Train `steps` on each of `quantiles` slices of every source, `seeds` times.

    The loss is on `tokens` held-out tokens of the source `on`, or of each source."""
    proxies = Proxies(recipe, out, steps=steps, on=on, tokens=tokens, column=column, on_status=on_status, log=log)
    recipe = proxies.recipe
    proxies.total = steps * quantiles * len(proxies.names) * seeds
    losses: dict[str, list[float]] = {}
    warnings: list[str] = []

    def proxy(stream: TokenStream, name: str) -> float:
        warnings.extend(stream.plan.warnings)
        first = recipe.train.seed
        losses[name] = [proxies.loss(stream, name, seed) for seed in range(first, first + seeds)]
        return statistics.mean(losses[name])

    table = benchmark_quantiles(
        proxies.data,
        proxies.section,
        proxy,
        tokens=steps * recipe.train.batch_tokens,
        batch_tokens=recipe.train.batch_tokens,
        quantiles=quantiles,
        column=column,
    )
    found = Quantiles(table, losses, warnings)
    write_json(out / RESULT, report(found))
    return found


def report(found: Quantiles) -> dict[str, Any]:
    """Plain values."""
    table = found.table
    return {
        "column": table.column,
        "slices": [vars(piece) for piece in table.slices],
        "losses": found.losses,
        "noise": found.noise,
        "quality": table.quality,
        "phases": [phase.model_dump(mode="json") for phase in table.recommendation.phases],
        "warnings": found.warnings,
    }
