"""Quantile benchmarking with a proxy whose losses are known."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from moesaic.data.mixture import make_plan
from moesaic.data.quantiles import QuantileTable, benchmark_quantiles
from moesaic.data.shards import Shards
from moesaic.data.stream import TokenStream
from moesaic.errors import UserError
from moesaic.recipe_sections import DataSection, PhaseSection
from tests.data.made import make_recipe, make_shards, random_lengths


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    lengths = {"web": random_lengths(0, 200), "code": random_lengths(1, 100)}
    quality = {name: np.random.RandomState(2).rand(len(sizes)).tolist() for name, sizes in lengths.items()}
    return make_shards(tmp_path_factory.mktemp("quantiles") / "data", lengths, quality=quality, held_out=[4])


def quality_of(stream: TokenStream) -> tuple[float, int]:
    """The mean quality and the domain of what a proxy would be trained on."""
    batches = list(islice(stream, 5))
    tokens = np.concatenate([batch.tokens_T.numpy() for batch in batches])
    numbers = np.searchsorted(stream.data.starts, tokens - 1, side="right") - 1
    assert 4 not in numbers
    return float(stream.data.column("quality")[numbers].mean()), batches[0].domains[0]


def run(data: Shards, proxy: object, scores: Any = (), **more: Any) -> tuple[QuantileTable, DataSection]:
    section = make_recipe({"web": 1, "code": 1}, scores=scores).data
    return benchmark_quantiles(data, section, proxy, tokens=800, batch_tokens=160, **more), section  # type: ignore[arg-type]


def test_every_slice_is_trained_on_by_itself_and_better_ones_are_recommended(data: Shards) -> None:
    def proxy(stream: TokenStream, name: str) -> float:
        names.append(name)
        quality, domain = quality_of(stream)
        return 4.0 - quality + (0.3 if domain == 1 else 0)  # better data is better, and code is worse

    names: list[str] = []
    table, section = run(data, proxy)
    assert names[:2] == ["web 0%-25%", "web 25%-50%"] and names[-1] == "code 75%-100%"
    assert [(piece.source, piece.number) for piece in table.slices] == [
        (source, number) for source in ("web", "code") for number in range(4)
    ]
    for source in ("web", "code"):
        mine = [piece for piece in table.slices if piece.source == source]
        losses = [piece.loss for piece in mine]
        assert losses == sorted(losses, reverse=True)
        assert all(lower.high <= higher.low for lower, higher in pairwise(mine))
        total = sum(piece.tokens for piece in mine)
        assert all(piece.tokens == pytest.approx(total / 4, rel=0.1) for piece in mine)
    first, second = table.recommendation.phases
    assert first.weights["web"] > 2 * first.weights["code"]  # twice as large, and better
    assert second.keep["web"] > second.keep["code"] >= 0.25
    # It is a recipe's, as it stands.
    assert make_plan(data, section.model_copy(update={"phases": (first, second)}), tokens=4000).usage
    text = table.text().splitlines()
    assert "75%-100%" in text[0] and text[1].startswith("web") and "*" in text[1]
    assert "recommended: 70% of the run" in text[-2]
    assert [PhaseSection(**entry) for entry in yaml.safe_load(table.snippet())["data"]["phases"]] == [first, second]


def test_what_is_kept_is_the_best_by_the_column_that_was_compared(data: Shards) -> None:
    """Phases keep by quality, so a recipe that follows the advice must take the column for it."""
    data.add_column("edu", 1 - data.column("quality"))
    data.add_column("repetition", 1 - data.column("quality"))

    def loss(stream: TokenStream, name: str) -> float:
        return 3.0 + quality_of(stream)[0]

    def told(**more: Any) -> Any:
        return yaml.safe_load(run(data, loss, **more)[0].snippet())["data"]

    brought = told(column="edu")
    assert brought["phases"][1]["keep"] and brought["quality"] == {"name": "column", "column": "edu"}
    scored = told(column="repetition", scores=[{"name": "repetition", "words": 3}])
    assert scored["phases"][1]["keep"] and scored["quality"] == {"name": "repetition", "words": 3}
    table, _ = run(data, lambda stream, name: 3.0 - quality_of(stream)[0])
    assert table.recommendation.phases[1].keep and "quality:" not in table.snippet()


def test_a_quality_that_says_nothing_is_not_kept_by(data: Shards) -> None:
    table, _ = run(data, lambda stream, name: 3.0 + quality_of(stream)[0])
    (phase,) = table.recommendation.phases
    assert phase.share == 1 and not phase.keep
    assert "higher quality did not lower the loss" in table.text()


def test_equal_losses_weigh_sources_by_size(data: Shards) -> None:
    table, _ = run(data, lambda stream, name: 3.0)
    sizes = {name: sum(piece.tokens for piece in table.slices if piece.source == name) for name in ("web", "code")}
    assert table.recommendation.phases[0].weights["web"] == pytest.approx(sizes["web"] / sum(sizes.values()), abs=1e-3)


def test_mistakes(data: Shards, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be compared"):
        run(data, lambda stream, name: 1.0, quantiles=1)
    with pytest.raises(UserError, match="the proxy's loss on quantile 0 is nan"):
        run(data, lambda stream, name: float("nan"))
    small = make_shards(tmp_path / "d", {"web": [5, 5, 5, 5], "code": [50]})
    trained: list[str] = []
    with pytest.raises(UserError, match="1 document cannot be cut into 4"):
        run(small, lambda stream, name: trained.append(name) or 1.0)  # type: ignore[func-returns-value]
    assert not trained
