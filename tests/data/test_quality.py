"""Quality scores: each orders texts as it says it does."""

from __future__ import annotations

import math
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.data.quality import QualityScore
from moesaic.data.records import Document, ReadPosition
from moesaic.errors import UserError
from moesaic.methods import Method, build
from tests.data.models import tiny_model
from tests.matrix import QUALITY_SCORES, filled

PROSE = "It was a bright cold day in April, and every clock in the long grey street had its own opinion of the hour."
LOOP = "the same again, " * 30
NOISE = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/", k=500))


def score(name: str, *texts: str, **options: Any) -> list[float]:
    method = build(Method(name, options), QualityScore, "here")
    return method.score([Document(text, ReadPosition(), {"edu": float(len(text))}) for text in texts])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("quality") / "model")


@pytest.mark.parametrize("name", QUALITY_SCORES)
class TestEveryQualityScore:
    def test_a_text_has_one_score_whatever_stands_beside_it(self, name: str, model: Path) -> None:
        options = filled(QUALITY_SCORES[name], model=model)
        texts = [PROSE, LOOP, NOISE, "x", ""]
        together = score(name, *texts, **options)
        assert all(math.isfinite(value) for value in together) and len(set(together)) > 1
        assert together == pytest.approx([score(name, text, **options)[0] for text in texts], rel=1e-4)

    def test_an_option_it_has_not_is_refused(self, name: str, model: Path) -> None:
        with pytest.raises(UserError, match="no such option"):
            score(name, "a", **filled(QUALITY_SCORES[name], model=model), nothing=1)


class TestCompression:
    def test_is_zlibs_ratio(self) -> None:
        raw = (PROSE * 3).encode()
        assert score("compression", PROSE * 3) == [len(zlib.compress(raw, 6)) / len(raw)]

    def test_orders_loops_prose_and_noise(self) -> None:
        loop, prose, noise = score("compression", LOOP, PROSE * 2, NOISE)
        assert loop < prose < noise
        loop, prose, noise = score("compression", LOOP, PROSE * 2, NOISE, target=prose)
        assert prose == 0 > max(loop, noise)

    def test_options_are_checked(self) -> None:
        with pytest.raises(UserError, match="from 1 to 9"):
            score("compression", "a", level=10)
        with pytest.raises(UserError, match="at least 1, not -5"):
            score("length", "a", max_characters=-5)


def test_length() -> None:
    assert score("length", "a" * 9, "a" * 99) == [math.log(10), math.log(100)]
    assert score("length", "a" * 50, "a" * 99, max_characters=50) == [math.log(51)] * 2


def test_repetition() -> None:
    assert score("repetition", "a b c d e", "too short", words=2) == [1.0, 1.0]
    assert score("repetition", "a b a b a b", words=2) == [2 / 5]
    assert score("repetition", LOOP)[0] < 0.05 < 0.9 < score("repetition", PROSE)[0]


class TestColumn:
    def test_is_the_number(self) -> None:
        assert score("column", "ab", "abc", column="edu") == [2.0, 3.0]
        assert score("column", "ab", "abc", column="edu", descending=True) == [-2.0, -3.0]

    def test_must_be_there(self) -> None:
        method = build(Method("column", {"column": "grade"}), QualityScore, "here")
        with pytest.raises(UserError, match='web: has no column "grade"'):
            method.check(["edu"], "web")


def test_perplexity_is_the_models_mean_logprob(model: Path) -> None:
    texts = ["def f(x): return 1", "the number 3", "x", "", "a b c " * 50]
    found = score("perplexity", *texts, model=str(model), tokens=16, batch_tokens=24)
    loaded = moesaic.load(model)
    assert loaded.tokenizer is not None
    for text, value in zip(texts, found, strict=True):
        tokens = loaded.tokenizer.encode(text)[:16]
        unknown = -math.log(loaded.config.vocab)  # not the best of all
        expected = float(loaded.logprobs([tokens])[0].mean()) if len(tokens) > 1 else unknown
        assert value == pytest.approx(expected, rel=1e-3)
    assert found[0] < 0


def test_consistency_is_the_mean_probability_over_models(model: Path, tmp_path: Path) -> None:
    texts = ["def f(x): return 1", "the number 3", "x"]
    paths = [str(model), str(tiny_model(tmp_path / "other", seed=1))]
    found = score("consistency", *texts, models=paths, tokens=16, batch_tokens=24)
    loaded = [moesaic.load(path) for path in paths]
    for text, value in zip(texts, found, strict=True):
        each = []
        for one in loaded:
            assert one.tokenizer is not None
            tokens = one.tokenizer.encode(text)[:16]
            known = float(one.logprobs([tokens])[0].exp().mean()) if len(tokens) > 1 else 1 / one.config.vocab
            each.append(known)
        assert value == pytest.approx(sum(each) / 2, rel=1e-3)


def test_a_model_that_is_not_there_is_missed_before_any_text_is_read() -> None:
    method = build(Method("perplexity", {"model": "nowhere"}), QualityScore, "here")
    with pytest.raises(UserError, match="nowhere: no such directory"):
        method.check([], "web")
