"""The recipe's section data: what can be written, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import UserError
from moesaic.methods import Method
from moesaic.recipe import Recipe, load_recipe
from moesaic.recipe_sections import DedupeSection, LengthWarmupSection


@pytest.fixture
def load(tmp_path: Path) -> object:
    def load(text: str) -> Recipe:
        (tmp_path / "r.yaml").write_text(text)
        return load_recipe(tmp_path / "r.yaml")

    return load


def test_everything_that_can_be_written(load) -> None:  # type: ignore[no-untyped-def]
    data = load("""
        data:
          sources:
            - {name: web, path: "web/*.jsonl.zst", text: body, columns: [edu], documents: 9, max_epochs: 1.5}
            - {name: books, path: books.txt, separator: "\\n\\n"}
          dedupe: {near: true, similarity: 0.7}
          quality: {name: column, column: edu}
          scores: [length]
          phases: [{share: 1, weights: {web: 1}, keep: {web: 0.25}}]
          when_exhausted: stop
          length_warmup: {steps: 50}
    """).data
    assert data.sources[0].max_epochs == 1.5 and data.sources[0].columns == ("edu",)
    assert data.sources[1].separator == "\n\n"
    assert data.dedupe == DedupeSection(near=True, similarity=0.7)
    assert data.quality == Method("column", {"column": "edu"}) and data.scores == (Method("length"),)
    assert data.phases[0].keep == {"web": 0.25}
    assert data.length_warmup == LengthWarmupSection(steps=50, start=64, batch="same")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{sources: [{name: a, path: b, max_epoch: 1}]}", "did you mean data.sources.0.max_epochs?"),
        ("{sources: [{name: a, path: b, separator: ''}]}", "data.sources.0.separator"),
        ("{dedupe: {similarity: 1.5}}", "data.dedupe.similarity: must be less than 1"),
        ("{phases: [{share: 1, weights: {a: -1}}]}", "data.phases.0.weights.a: must be at least 0"),
        ("{phases: [{share: 1, weights: {a: 1}, keep: {a: 0}}]}", "data.phases.0.keep.a: must be greater than 0"),
        ("{length_warmup: {start: 8}}", "data.length_warmup.steps: missing"),
        ("{when_exhausted: repeat}", "expected one of reweight, stop"),
        ("{held_out: 1.0}", "data.held_out: must be less than 1"),
    ],
)
def test_mistakes(load, text: str, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        load(f"data: {text}")
    assert told in str(caught.value)
