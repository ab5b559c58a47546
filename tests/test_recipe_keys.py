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
    text = re.sub(
        r"^  # (offload|average|token_drop|indexer|adversarial|memory):", r"  \1:", keys("train"), flags=re.MULTILINE
    )
    text = re.sub(r"^  #   (\w+: )", r"    \1", text, flags=re.MULTILINE)
    text = re.sub(r"^  # layer_drop:", "  layer_drop:", text, flags=re.MULTILINE)
    (tmp_path / "on.yaml").write_text(text)
    train = load_recipe(tmp_path / "on.yaml").train
    assert train.average is not None and train.token_drop is not None and train.layer_drop is not None
    assert train.offload is not None


def test_keys_are_grouped_by_what_people_look_for() -> None:
    index, text = keys().split("\n\n", 1)
    named = re.sub(r"\n#     ", " ", index)
    lines = dict(re.findall(r"^# ([^:\n]+): (.+)$", named, re.MULTILINE))
    assert {"train.token_drop", "train.layer_drop"} <= set(lines["cheaper steps"].split(", "))
    assert {"data.length_warmup", "train.clip", "train.spike"} <= set(lines["stability"].split(", "))  # of two sections
    every = [key for one in lines.values() for key in one.split(", ")]
    sections = {name: getattr(Recipe(), name) for name in Recipe.model_fields}
    plain = {name for name, section in sections.items() if not hasattr(section, "model_fields_set")}
    expected = [f"{name}.{key}" for name in sections if name not in plain for key in type(sections[name]).model_fields]
    assert sorted(every) == sorted([*expected, *plain])
    under = text[text.index("  # -- cheaper steps") :]
    assert under.index("token_drop") < under.index("  # -- a better end") < under.index("average")
    for section in sections.values():  # a heading stands over a key that there is
        assert set(getattr(type(section), "headings", {})) <= set(getattr(type(section), "model_fields", {}))
