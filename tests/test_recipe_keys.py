"""The list of a recipe's keys: complete, and itself a recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moesaic.cli import main
from moesaic.recipe import Recipe, load_recipe
from moesaic.recipe_keys import keys


def test_it_is_the_recipe_of_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(keys())
    assert load_recipe(tmp_path / "all.yaml").dump() == Recipe().dump()


def test_no_key_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--keys"]) == 0
    text = capsys.readouterr().out
    for key in ("family", "kv_rank", "max_epochs", "evaluate_every", "layer_token_rate", "patience", "z_loss"):
        assert re.search(rf"^[ #]*{key}: ", text, re.MULTILINE), key
    assert "constant, cosine, from_file" in text and "compression" in text
    assert all(re.search(rf"^{section}:", text, re.MULTILINE) for section in Recipe.model_fields)


def test_what_is_off_can_be_turned_on_by_taking_the_marks_away(tmp_path: Path) -> None:
    text = re.sub(r"^  # (offload|average|token_drop):", r"  \1:", keys("train"), flags=re.MULTILINE)
    text = re.sub(r"^  #   (\w+: )", r"    \1", text, flags=re.MULTILINE)
    text = re.sub(r"^  # layer_drop:", "  layer_drop:", text, flags=re.MULTILINE)
    (tmp_path / "on.yaml").write_text(text)
    train = load_recipe(tmp_path / "on.yaml").train
    assert train.average is not None and train.token_drop is not None and train.layer_drop is not None
    assert train.offload is not None
