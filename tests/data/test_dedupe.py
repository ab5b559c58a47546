"""Duplicates: exact up to case and white space, near by MinHash, and remembered over a restart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from moesaic.data.dedupe import DocumentIndex, bands
from moesaic.recipe_sections import DedupeSection

WORDS = [f"word{n}" for n in range(3000)]


def text(seed: int, words: int = 200) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def changed(original: str, words: int) -> str:
    """The same text with some words in a row replaced."""
    parts = original.split()
    return " ".join([*parts[:50], *(f"other{n}" for n in range(words)), *parts[50 + words :]])


def test_exact(tmp_path: Path) -> None:
    seen = DocumentIndex(DedupeSection(), tmp_path)
    assert seen.check("Some text.") == "new"
    assert seen.check("  some\n\nTEXT. ") == "duplicate"
    assert seen.check("Some text!") == "new"


def test_off(tmp_path: Path) -> None:
    seen = DocumentIndex(DedupeSection(exact=False), tmp_path)
    assert [seen.check("a"), seen.check("a")] == ["new", "new"]


@pytest.mark.parametrize(("words", "verdict"), [(4, "near_duplicate"), (100, "new")])
def test_near(tmp_path: Path, words: int, verdict: str) -> None:
    seen = DocumentIndex(DedupeSection(near=True), tmp_path)
    texts = [text(seed) for seed in range(30)]
    assert {seen.check(one) for one in texts} == {"new"}
    # 4 of 200 words change 8 of 196 runs: similarity 0.92; 100 of them: below 0.4.
    assert [seen.check(changed(one, words)) for one in texts].count(verdict) == 30  # type: ignore[arg-type]


def test_near_finds_what_is_just_similar_enough(tmp_path: Path) -> None:
    seen = DocumentIndex(DedupeSection(near=True), tmp_path)
    texts = [text(seed) for seed in range(100)]
    assert {seen.check(one) for one in texts} == {"new"}
    # 10 of 200 words change 14 of 196 runs: similarity 182 / 210, and 0.8 is asked for.
    assert [seen.check(changed(one, 10)) for one in texts].count("near_duplicate") >= 95


@pytest.mark.parametrize("hashes", [16, 128])
@pytest.mark.parametrize("similarity", [0.01, 0.5, 0.9, 0.999])
def test_any_similarity_can_be_asked_for(tmp_path: Path, similarity: float, hashes: int) -> None:
    seen = DocumentIndex(DedupeSection(near=True, similarity=similarity, hashes=hashes), tmp_path)
    assert [seen.check(one) for one in ("one two three four five six", "One, two; three four five six!", text(1))] == [
        "new", "near_duplicate", "new",
    ]  # fmt: skip
    count, size = bands(similarity, hashes)
    assert count * size <= hashes and count > 1


def test_short_texts_are_compared_too(tmp_path: Path) -> None:
    seen = DocumentIndex(DedupeSection(near=True), tmp_path)
    assert [seen.check(one) for one in ("one two", "one, two", "!!!", "???", "one two three")] == [
        "new", "near_duplicate", "new", "new", "new",
    ]  # fmt: skip


def test_remembers_what_was_settled_and_forgets_the_rest(tmp_path: Path) -> None:
    settings = DedupeSection(near=True)
    before = DocumentIndex(settings, tmp_path)
    for seed in range(10):
        before.check(text(seed))
    state = before.state()
    for seed in range(10, 20):
        before.check(text(seed))
    before.close()
    after = DocumentIndex(settings, tmp_path, state)
    verdicts = [after.check(text(seed)) for seed in range(20)]
    assert verdicts == ["duplicate"] * 10 + ["new"] * 10
    assert after.check(changed(text(3), 4)) == "near_duplicate"
