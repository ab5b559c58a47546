"""The plan: ratios, phases, repetition, caps and what happens when a source has no more."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesaic.data.curricula import Curriculum
from moesaic.data.mixture import Plan, make_plan
from moesaic.data.reuse import BORROWED, ReuseLaw
from moesaic.data.shards import Shards
from moesaic.errors import UserError
from tests.data.made import make_recipe, make_shards, random_lengths


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    lengths = {"a": random_lengths(0, 100), "b": random_lengths(1, 50), "c": random_lengths(2, 10)}
    return make_shards(tmp_path_factory.mktemp("mixture") / "data", lengths, held_out=[0, 100])


def plan_of(data: Shards, weights: dict[str, float], tokens: int, **section: Any) -> Plan:
    recipe = make_recipe(weights, **section)
    curriculum = recipe.build("data.curriculum", Curriculum) if recipe.data.curriculum else None
    return make_plan(data, recipe.data, curriculum, tokens=tokens)


def seen(data: Shards, plan: Plan, start: int, stop: int) -> tuple[Counter[int], Counter[str]]:
    """How often each token is drawn, and how many tokens of each source."""
    found: Counter[int] = Counter()
    sources: Counter[str] = Counter()
    for span in plan.spans(start, stop):
        found.update(data.gather(span.starts, span.lengths).tolist())
        for domain, length in zip(span.domains.tolist(), span.lengths.tolist()):
            sources[data.domains[domain]] += length
    return found, sources


def size(data: Shards, name: str) -> int:
    return int(data.lengths[(data.domain == data.domains.index(name)) & ~data.held_out].sum())


class TestRatios:
    def test_weights_are_shares_of_tokens(self, data: Shards) -> None:
        _, sources = seen(data, plan_of(data, {"a": 5, "b": 3, "c": 2}, 16_000), 0, 16_000)
        for name, weight in {"a": 5, "b": 3, "c": 2}.items():
            assert sources[name] == pytest.approx(1600 * weight, abs=5 * 16)

    def test_every_document_is_drawn_once_before_any_is_drawn_again(self, data: Shards) -> None:
        tokens = size(data, "a")
        found, _ = seen(data, plan_of(data, {"a": 1}, tokens), 0, tokens)
        assert len(found) == tokens and set(found.values()) == {1}
        again, _ = seen(data, plan_of(data, {"a": 1}, tokens), tokens, 2 * tokens)
        assert again == found

    def test_what_is_held_out_is_never_drawn(self, data: Shards) -> None:
        found, _ = seen(data, plan_of(data, {"a": 1, "b": 1}, 20_000), 0, 20_000)
        held = {token for number in (0, 100) for token in data.document(number).tolist()}
        assert held and not held & set(found)

    def test_the_order_hangs_on_the_seed_and_nothing_else(self, data: Shards) -> None:
        plans = [plan_of(data, {"a": 2, "b": 1}, 5000, seed=seed) for seed in (0, 0, 1)]
        first, same, other = ([s.starts.tolist() for s in plan.spans(100, 3000)] for plan in plans)
        assert first == same != other
        assert plans[0].fingerprint == plans[1].fingerprint != plans[2].fingerprint
        # How long the run is does not matter as long as nothing is timed by it.
        assert plan_of(data, {"a": 2, "b": 1}, 9000).fingerprint == plans[0].fingerprint


class TestPhases:
    PHASES = [
        {"share": 0.5, "weights": {"a": 1, "b": 1}},
        {"share": 0.5, "weights": {"b": 3, "c": 1}, "keep": {"b": 0.25}},
    ]

    def test_each_has_its_own_weights(self, data: Shards) -> None:
        plan = plan_of(data, {"a": 1, "b": 1, "c": 1}, 3200, phases=self.PHASES)
        _, first = seen(data, plan, 0, 1600)
        _, second = seen(data, plan, 1600, 3200)
        assert first["a"] == pytest.approx(800, abs=48) and not first["c"]
        assert second["b"] == pytest.approx(1200, abs=48) and not second["a"]

    def test_only_the_best_share_is_repeated(self, data: Shards) -> None:
        plan = plan_of(data, {"a": 1, "b": 1, "c": 1}, 16_000, phases=self.PHASES)
        found, _ = seen(data, plan, 8000, 16_000)
        mine = np.flatnonzero((data.domain == 1) & ~data.held_out)
        drawn = [n for n in mine.tolist() if found[int(data.document(n)[0])]]
        quality = data.column("quality")
        assert quality[drawn].min() >= quality[[n for n in mine.tolist() if n not in drawn]].max()
        assert data.lengths[drawn].sum() / size(data, "b") == pytest.approx(0.25, abs=0.06)
        use = next(use for use in plan.usage if use.pool == "b (best 0.25)")
        assert use.epochs == pytest.approx(6000 / data.lengths[drawn].sum(), rel=0.02)

    def test_the_best_of_what_was_not_scored_is_refused(self, tmp_path: Path) -> None:
        made = make_shards(tmp_path / "d", {"a": [30] * 4, "b": [30] * 4})
        made.add_column("quality", np.array([1, 2, 3, 4, *[np.nan] * 4]))
        phases = [{"share": 1, "weights": {"a": 1, "b": 1}, "keep": {"a": 0.5}}]
        assert plan_of(made, {"a": 1, "b": 1}, 100, phases=phases)
        phases[0]["keep"] = {"b": 0.5}
        with pytest.raises(UserError, match='best of b, whose column "quality" has gaps'):
            plan_of(made, {"a": 1, "b": 1}, 100, phases=phases)

    def test_a_later_phase_goes_on_where_the_earlier_one_was(self, data: Shards) -> None:
        tokens = size(data, "a") // 32 * 32
        halves = [{"share": 0.5, "weights": {"a": 1}}, {"share": 0.5, "weights": {"a": 1, "b": 0}}]
        found, _ = seen(data, plan_of(data, {"a": 1, "b": 1}, tokens, phases=halves), 0, tokens)
        assert set(found.values()) == {1}

    @pytest.mark.parametrize(
        ("phases", "told"),
        [
            ([{"share": 1, "weights": {"aa": 1}}], 'data.phases.0.weights.aa: no source is named "aa"'),
            ([{"share": 1, "weights": {"a": 1}, "keep": {"z": 0.5}}], 'data.phases.0.keep.z: no source is named "z"'),
            ([{"share": 0.5, "weights": {"a": 1}}], "data.phases: their shares sum to 0.5"),
            ([{"share": 1, "weights": {"a": 0}}], "samples from no source"),
        ],
    )
    def test_mistakes_are_told(self, data: Shards, phases: list[dict[str, Any]], told: str) -> None:
        with pytest.raises(UserError) as caught:
            plan_of(data, {"a": 1, "b": 1}, 1000, phases=phases)
        assert told in str(caught.value)


class TestExhaustion:
    def test_the_others_take_over(self, data: Shards) -> None:
        total = 8000
        plan = plan_of(data, {"a": 1, "b": 1, "c": 1}, total, extra={"c": {"max_epochs": 2}, "b": {"max_epochs": 1}})
        found, sources = seen(data, plan, 0, total)
        for name, epochs in (("b", 1), ("c", 2)):
            assert epochs * size(data, name) <= sources[name] < epochs * size(data, name) + 16
        assert sources["a"] == total - sources["b"] - sources["c"]
        # Until then the ratio is even, afterwards the rest keep theirs.
        _, early = seen(data, plan, 0, 480)
        assert all(count == pytest.approx(160, abs=32) for count in early.values())

    def test_or_the_data_ends(self, data: Shards) -> None:
        plan = plan_of(data, {"a": 1, "c": 1}, 8000, extra={"c": {"max_epochs": 1}}, when_exhausted="stop")
        assert plan.tokens is not None
        assert plan.tokens == pytest.approx(2 * size(data, "c"), abs=80)
        _, sources = seen(data, plan, 0, plan.tokens)
        assert size(data, "c") <= sources["c"] < size(data, "c") + 16

    def test_nothing_left_is_an_error(self, data: Shards) -> None:
        with pytest.raises(UserError, match="within their max_epochs"):
            plan_of(data, {"c": 1}, 100_000, extra={"c": {"max_epochs": 1}})

    def test_an_unknown_source_is_an_error(self, data: Shards) -> None:
        with pytest.raises(UserError, match="was prepared without z"):
            plan_of(data, {"z": 1}, 1000)


class TestReuse:
    @pytest.mark.parametrize("law", [BORROWED, ReuseLaw(-1.0, 0.3, "log", "sum"), ReuseLaw(-2.0, 0.2, "power", "sum")])
    def test_the_curve(self, law: ReuseLaw) -> None:
        for tokens in (10**6, 10**9, 10**12):
            assert law.effective(1, tokens) == 1
            assert law.effective(0.5, tokens) == 0.5
            assert law.effective(1.01, tokens) == pytest.approx(1.01, abs=1e-3)
            assert law.effective(10**7, tokens) == pytest.approx(1 + law.plateau(tokens), rel=1e-3)
            step = law.effective(5.001, tokens) - law.effective(5, tokens)
            assert law.marginal(5, tokens) == pytest.approx(step / 0.001, rel=1e-3)
            assert law.marginal(law.useful(tokens), tokens) == pytest.approx(0.5)

    def test_a_larger_data_set_can_be_repeated_more(self) -> None:
        plateau = BORROWED.plateau
        assert plateau(10**12) - plateau(10**9) == pytest.approx(plateau(10**9) - plateau(10**6))
        assert BORROWED.effective(20, 10**10) > BORROWED.effective(20, 10**6)
        # Muennighoff et al.: up to four epochs nearly as good as fresh data, at billions of tokens.
        assert BORROWED.effective(4, 10**10) > 0.9 * 4

    def test_a_recipe_takes_a_law_of_its_own(self, data: Shards, tmp_path: Path) -> None:
        strict, loose = tmp_path / "strict.json", tmp_path / "loose.json"
        strict.write_text(json.dumps(ReuseLaw(0.5, 0.0).content()))
        loose.write_text(json.dumps(ReuseLaw(100.0, 0.0).content()))
        plain = plan_of(data, {"a": 1, "b": 1}, 6000)
        assert not plain.warnings and plan_of(data, {"a": 1, "b": 1}, 6000, reuse=str(strict)).warnings
        assert not plan_of(data, {"a": 9, "c": 1}, 12_000, reuse=str(loose)).warnings
        told = plan_of(data, {"a": 1, "b": 1}, 6000, reuse=str(strict))
        assert told.fingerprint == plain.fingerprint  # what is warned about changes no token
        assert all(use.effective <= 1.5 for use in told.usage)
        strict.write_text("{}")
        with pytest.raises(UserError, match="not a law of reuse"):
            plan_of(data, {"a": 1}, 1000, reuse=str(strict))

    def test_a_pilot_trains_on_part_of_the_data(self, data: Shards) -> None:
        small, large = (plan_of(data, {"a": 1, "b": 1}, 6000, unique_tokens=size) for size in (500, 1000))
        few, many = (set(seen(data, plan, 0, 6000)[0]) for plan in (small, large))
        assert few < many  # fewer are among the more
        assert 500 <= sum(use.tokens for use in small.usage) < 700
        assert sum(use.drawn for use in small.usage) >= 6000  # repeated instead
        with pytest.raises(UserError, match="data.unique_tokens"):
            plan_of(data, {"a": 1}, 1000, unique_tokens=10**9)

    def test_a_mixture_that_repeats_too_much_is_warned_about(self, data: Shards) -> None:
        assert not plan_of(data, {"a": 1, "c": 0.01}, 5000).warnings
        (warning,) = plan_of(data, {"a": 9, "c": 1}, 12_000).warnings
        assert warning.startswith("c is repeated ") and "of what fresh data would" in warning


def test_plans_of_many_curricula_cover_the_run(data: Shards, tmp_path: Path) -> None:
    for curriculum in ("length", "multi_domain", {"name": "quality", "pacing": "root", "stages": 3}):
        plan = plan_of(data, {"a": 2, "b": 1}, 4000, curriculum=curriculum, phases=[
            {"share": 0.3, "weights": {"a": 1, "b": 1}},
            {"share": 0.7, "weights": {"a": 3, "b": 1}, "keep": {"a": 0.5}},
        ])  # fmt: skip
        _, sources = seen(data, plan, 1200, 4000)
        assert sum(sources.values()) == 2800
        assert sources["a"] == pytest.approx(2100, abs=64)
