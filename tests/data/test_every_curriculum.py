"""One matrix for every curriculum: an order decided by the data, the recipe and the seed, which opens when it says."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.data.curricula import Curriculum
from moesaic.data.mixture import Plan, make_plan
from moesaic.data.shards import Shards
from moesaic.data.stream import TokenStream
from moesaic.errors import UserError
from moesaic.methods import Method, build
from tests.data.made import make_recipe, make_shards, random_lengths
from tests.matrix import CURRICULA

WEIGHTS = {"a": 1.0, "b": 1.0}
RUN = 40_000  # tokens


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("curricula") / "data"
    made = make_shards(directory, {"a": random_lengths(3, 300, 20), "b": random_lengths(4, 100, 20)})
    made.add_column("consistency", np.random.RandomState(0).rand(made.documents))
    made.add_column("grade", np.random.RandomState(1).rand(made.documents))
    return directory


@pytest.fixture(scope="module")
def data(where: Path) -> Shards:
    return Shards(where)


def curriculum(name: str, **more: Any) -> Curriculum:
    return build(Method(name, CURRICULA[name] | more), Curriculum, "here")


def plan(data: Shards, method: Curriculum, tokens: int = RUN, **section: Any) -> Plan:
    return make_plan(data, make_recipe(WEIGHTS, **section).data, method, tokens=tokens)


def order(of: Plan, stop: int = RUN) -> list[tuple[int, int]]:
    """Where every piece begins in the data, and how long it is."""
    return [
        piece
        for start in range(0, stop, 160)
        for span in of.spans(start, min(start + 160, stop))
        for piece in zip(span.starts.tolist(), span.lengths.tolist(), strict=True)
    ]


def easiest(data: Shards, method: Curriculum, domain: int, share: float) -> set[int]:
    """The documents of a source among its easiest `share` of tokens."""
    mine = np.flatnonzero(data.domain == domain)
    ranked = mine[np.argsort(method.difficulty(data)[mine], kind="stable")]
    before = np.cumsum(data.lengths[ranked]) - data.lengths[ranked]
    return set(ranked[before / data.lengths[ranked].sum() < share].tolist())


@pytest.mark.parametrize("name", CURRICULA)
class TestEveryCurriculum:
    def test_is_found_by_its_name(self, name: str) -> None:
        assert type(curriculum(name)).__module__.endswith(f".{name}")

    def test_refuses_an_option_it_has_not(self, name: str) -> None:
        with pytest.raises(UserError, match="no such option"):
            curriculum(name, nothing=1)

    def test_every_document_has_a_difficulty(self, name: str, data: Shards, where: Path) -> None:
        found = curriculum(name).difficulty(data)
        assert found.shape == (data.documents,) and np.isfinite(found).all() and len(np.unique(found)) > 10
        assert np.array_equal(found, curriculum(name).difficulty(Shards(where)))

    def test_the_seed_decides_the_order(self, name: str, data: Shards) -> None:
        first, again, another = (plan(data, curriculum(name), seed=seed) for seed in (7, 7, 8))
        assert order(first) == order(again) and first.fingerprint == again.fingerprint
        assert first.fingerprint != another.fingerprint and order(first) != order(another)

    def test_every_token_comes_once_in_an_epoch(self, name: str, data: Shards) -> None:
        """Of a source that is open from the start."""
        method = curriculum(name) if curriculum(name).is_sorted else curriculum(name, start=1.0, stages=1)
        epoch = int(data.lengths[data.domain == 0].sum())
        run = make_plan(data, make_recipe({"a": 1.0}).data, method, tokens=2 * epoch)
        for number in range(2):
            seen: Counter[int] = Counter()
            for span in run.spans(number * epoch, (number + 1) * epoch):
                for start, length in zip(span.starts.tolist(), span.lengths.tolist(), strict=True):
                    seen.update(range(start, start + length))
            assert len(seen) == epoch and set(seen.values()) == {1}

    def test_resumes_in_the_middle(self, name: str, where: Path) -> None:
        recipe = make_recipe(WEIGHTS, 12, 64, curriculum={"name": name, **CURRICULA[name]})
        stream = TokenStream.open(where, recipe)
        whole = list(islice(stream, 12))
        for done in (1, 5, 11):
            resumed = TokenStream.open(where, recipe).from_position(whole[done - 1].position_after)
            for ours, theirs in zip(islice(resumed, 12 - done), whole[done:], strict=True):
                assert torch.equal(ours.tokens_T, theirs.tokens_T) and ours.lengths == theirs.lengths
                assert ours.position_after == theirs.position_after
        other = TokenStream.open(where, make_recipe(WEIGHTS, 12, 64))
        with pytest.raises(UserError, match="mixes or orders the data differently"):
            other.from_position(whole[4].position_after)

    def test_stages_open_when_they_say(self, name: str, data: Shards) -> None:
        """From each opening on the easiest share is drawn from, no more and no less; all of it in the end."""
        method = curriculum(name) if curriculum(name).is_sorted else curriculum(name, start=0.2, until=0.8, stages=4)
        openings = method.openings()
        assert openings[0][0] == 0 and openings[-1][1] == 1
        tokens = 5 * RUN  # each stage is long enough for all that is open
        run = plan(data, method, tokens)
        ends = [done for done, _ in openings[1:]] + [1.0]
        for number, ((begin, share), end) in enumerate(zip(openings, ends, strict=True)):
            documents = {
                found
                for span in run.spans(round(begin * tokens), round(end * tokens))
                for found in (np.searchsorted(data.starts, span.starts, side="right") - 1).tolist()
            }
            for domain in (0, 1):
                mine = {found for found in documents if data.domain[found] == domain}
                assert mine == easiest(data, method, domain, share), (number, domain)

    def test_sources_keep_their_ratio(self, name: str, data: Shards) -> None:
        run = plan(data, curriculum(name))
        for start in range(0, RUN, 4000):
            spans = run.spans(start, start + 4000)
            first = sum(int(span.lengths[span.domains == 0].sum()) for span in spans)
            assert first == pytest.approx(2000, abs=128)
