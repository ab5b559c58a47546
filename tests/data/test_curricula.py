"""Curricula: easy documents first, in the way each says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import moesaic
from moesaic.data.consistency_score import score_consistency
from moesaic.data.curricula import Curriculum
from moesaic.data.curricula.rarity import vocabulary_rarity
from moesaic.data.mixture import Plan, make_plan
from moesaic.data.shards import Shards
from moesaic.errors import UserError
from moesaic.methods import Method, build
from tests.data.made import make_recipe, make_shards, random_lengths
from tests.data.models import VOCABULARY, tiny_model
from tests.matrix import CURRICULA

SLOT = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Shards:
    lengths = {"a": random_lengths(3, 300, 20), "b": random_lengths(4, 100, 20)}
    made = make_shards(tmp_path_factory.mktemp("curricula") / "data", lengths)
    made.add_column("consistency", np.random.RandomState(0).rand(made.documents))
    made.add_column("grade", np.random.RandomState(1).rand(made.documents))
    return made


def curriculum(name: str, **options: Any) -> Curriculum:
    return build(Method(name, options), Curriculum, "here")


def plan(data: Shards, method: Curriculum, tokens: int, **section: Any) -> Plan:
    return make_plan(data, make_recipe({"a": 1, "b": 1}, **section).data, method, tokens=tokens)


def drawn(data: Shards, of: Plan, start: int, stop: int, domain: int | None = None) -> list[int]:
    """The documents between two tokens of the run, in order."""
    found = []
    for span in of.spans(start, stop):
        numbers = np.searchsorted(data.starts, span.starts, side="right") - 1
        found += [n for n in numbers.tolist() if domain is None or data.domain[n] == domain]
    return found


DIFFICULTIES: list[tuple[str, dict[str, Any]]] = [
    *((name, options) for name, options in CURRICULA.items() if name != "multi_domain"),  # which is not paced
    ("quality", {}),
]


@pytest.mark.parametrize(("name", "options"), DIFFICULTIES, ids=str)
class TestPacedOnes:
    def test_only_the_easiest_are_drawn_at_first_and_all_at_last(
        self, data: Shards, name: str, options: dict[str, Any]
    ) -> None:
        method = curriculum(name, start=0.2, until=0.5, stages=4, **options)
        hard = method.difficulty(data)
        assert hard.shape == (data.documents,)
        run = plan(data, method, 40_000)
        for domain in (0, 1):
            mine = np.flatnonzero(data.domain == domain)
            order = mine[np.argsort(hard[mine], kind="stable")]
            before = np.cumsum(data.lengths[order]) - data.lengths[order]
            early = set(drawn(data, run, 0, 4900, domain))
            assert early == set(order[before / data.lengths[order].sum() < 0.2].tolist())
            assert set(drawn(data, run, 20_000, 40_000, domain)) == set(mine.tolist())

    def test_the_ratio_of_sources_does_not_change(self, data: Shards, name: str, options: dict[str, Any]) -> None:
        run = plan(data, curriculum(name, **options), 40_000)
        for start in range(0, 40_000, 4000):
            counts: Counter[int] = Counter()
            for span in run.spans(start, start + 4000):
                for domain, length in zip(span.domains.tolist(), span.lengths.tolist()):
                    counts[domain] += length
            assert counts[0] == pytest.approx(2000, abs=8 * SLOT)


class TestDifficulties:
    def test_length_and_quality(self, data: Shards) -> None:
        assert curriculum("length").difficulty(data).tolist() == data.lengths.tolist()
        assert curriculum("quality").difficulty(data).tolist() == data.column("quality").tolist()

    def test_rarity_is_the_sum_of_surprise(self, tmp_path: Path) -> None:
        from moesaic.data.curricula import rarity

        made = make_shards(tmp_path / "d", {"a": random_lengths(3, 50, 90)}, shard_tokens=200)
        # Tokens are all different here, so each has the probability 1 / n.
        expected = made.lengths * np.log(made.tokens)
        old, rarity.BLOCK = rarity.BLOCK, 128
        try:
            assert vocabulary_rarity(made) == pytest.approx(expected)
        finally:
            rarity.BLOCK = old
        assert vocabulary_rarity(made) == pytest.approx(expected)
        assert np.ptp(curriculum("rarity", mean=True).difficulty(made)) < 1e-9

    def test_rare_words_make_a_text_hard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of texts of equal length, the one whose words are met elsewhere too comes first."""
        made = make_shards(tmp_path / "d", {"a": [12] * 8})
        as_they_are = made.gather

        def fewer_words(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            tokens = as_they_are(starts, lengths)  # all different
            return np.where(tokens <= 7 * 12, 1, tokens)  # in the last document only

        monkeypatch.setattr(made, "gather", fewer_words)
        hard = curriculum("rarity").difficulty(made)
        assert np.ptp(hard[:7]) == 0 and hard[7] > 2 * hard[0]

    def test_regular_documents_come_before_exceptions(self, tmp_path: Path) -> None:
        made = make_shards(tmp_path / "d", {"a": [4] * 3})
        made.add_column("consistency", np.array([0.2, 0.9, 0.5]))
        assert curriculum("consistency").difficulty(made).argsort().tolist() == [1, 2, 0]

    def test_the_metric_of_a_column_either_way(self, data: Shards) -> None:
        grade = data.column("grade").astype(np.float64)
        assert (curriculum("column", column="grade").difficulty(data) == grade).all()
        assert (curriculum("column", column="grade", descending=True).difficulty(data) == -grade).all()

    def test_a_column_with_gaps_is_refused(self, tmp_path: Path) -> None:
        made = make_shards(tmp_path / "d", {"a": [3, 4]})
        made.add_column("grade", np.array([1, np.nan]))
        with pytest.raises(UserError, match='"grade" has gaps'):
            curriculum("column", column="grade").difficulty(made)
        with pytest.raises(UserError, match='"grade" has gaps'):
            curriculum("multi_domain", column="grade").difficulty(made)
        for name in ("quality", "consistency", "rarity"):
            other = make_shards(tmp_path / name, {"a": [3, 4]})
            other.add_column(name, np.array([1, np.nan]))
            with pytest.raises(UserError, match=f'"{name}" has gaps'):
                curriculum(name).difficulty(other)
        with pytest.raises(UserError, match='no column "consistency"'):
            curriculum("consistency").difficulty(made)

    def test_consistency_is_the_mean_probability_over_checkpoints(self, tmp_path: Path) -> None:
        made = make_shards(tmp_path / "d", {"a": [9, 5, 1, 30]})
        # This data's tokens must be ones the model knows.
        made.manifest["vocabulary"] = made.vocabulary = VOCABULARY
        paths = [tiny_model(tmp_path / str(seed), seed) for seed in (1, 2)]
        found = score_consistency(made, paths, max_length=12, batch_tokens=20)
        models = [moesaic.load(path) for path in paths]
        for number in (0, 1, 3):
            tokens = made.document(number)[:12].tolist()
            each = [float(model.logprobs([tokens])[0].exp().mean()) for model in models]
            assert found[number] == pytest.approx(sum(each) / 2, rel=1e-3)
        assert found[2] == pytest.approx(np.mean(found[[0, 1, 3]]))
        assert made.column("consistency").tolist() == found.astype(np.float32).tolist()

    def test_consistency_needs_a_model_of_this_data(self, tmp_path: Path) -> None:
        made = make_shards(tmp_path / "d", {"a": [9, 5]})
        with pytest.raises(UserError, match="knows 280 tokens, and the data has 50000"):
            score_consistency(made, [tiny_model(tmp_path / "m")])


class TestPacing:
    def test_functions(self) -> None:
        linear = curriculum("length", start=0.2, until=0.5, stages=4).openings()
        expected = np.array([(0, 0.2), (0.125, 0.4), (0.25, 0.6), (0.375, 0.8), (0.5, 1.0)])
        assert np.array(linear) == pytest.approx(expected)
        root = curriculum("length", pacing="root", degree=2, start=0.2, until=1.0, stages=4).openings()
        assert root[1] == pytest.approx((0.25, 0.2 + 0.8 * 0.5))
        steps = curriculum("length", pacing="steps", at=[0, 0.3], shares=[0.5, 1]).openings()
        assert steps == [(0, 0.5), (0.3, 1)]

    @pytest.mark.parametrize(
        "options",
        [
            {"start": 0},
            {"until": 1.5},
            {"stages": 0},
            {"pacing": "steps"},
            {"pacing": "steps", "at": [0, 0.5], "shares": [0.5]},
            {"pacing": "steps", "at": [0.1], "shares": [1]},
            {"pacing": "steps", "at": [0, 0.5], "shares": [1, 0.5]},
            {"at": [0], "shares": [1]},
            {"pacing": "cubic"},
        ],
    )
    def test_wrong_options_are_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(UserError):
            curriculum("length", **options)


class TestMultiDomain:
    def test_quality_ascends_within_each_domain_and_domains_stay_mixed(self, data: Shards) -> None:
        quality = data.column("quality")
        tokens = 2 * int(min(data.lengths[data.domain == domain].sum() for domain in (0, 1)) * 0.9) // SLOT * SLOT
        run = plan(data, curriculum("multi_domain"), tokens)
        for domain in (0, 1):
            starts = range(0, tokens, 160)
            order = [n for start in starts for n in drawn(data, run, start, min(start + 160, tokens), domain)]
            assert (np.diff(quality[order]) >= 0).all()
            # A fair sample of all qualities, not the worst of them.
            mine = quality[data.domain == domain]
            assert quality[order].max() > np.quantile(mine, 0.9)
            assert np.median(quality[order]) == pytest.approx(np.median(mine), abs=0.1)
        first, last = (len(drawn(data, run, start, start + 480, 0)) for start in (0, tokens - 480))
        assert first > 5 and last > 5

    def test_each_phase_ascends_by_itself_over_other_text(self, data: Shards) -> None:
        weights = {"a": 1.0, "b": 1.0}
        phases = [{"share": 0.5, "weights": weights}, {"share": 0.5, "weights": weights}]
        quality = data.column("quality")
        tokens = int(data.lengths[data.domain == 1].sum()) // 64 * 64
        run = plan(data, curriculum("multi_domain"), 2 * tokens, phases=phases)
        halves = [drawn(data, run, start, start + tokens, 1) for start in (0, tokens)]
        for half in halves:
            assert (np.diff(quality[half]) >= 0).sum() >= len(half) - 3
        pieces = [
            {n for span in run.spans(start, start + tokens) for n in span.starts[span.domains == 1].tolist()}
            for start in (0, tokens)
        ]
        assert len(pieces[0]) > 20 and len(pieces[0] & pieces[1]) <= 2

    def test_best_first(self, data: Shards) -> None:
        run = plan(data, curriculum("multi_domain", descending=True), 2000)
        order = drawn(data, run, 0, 2000, 0)
        assert (np.diff(data.column("quality")[order]) <= 0).sum() >= len(order) - 3
