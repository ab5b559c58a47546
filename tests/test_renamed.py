"""Names of the last version still work, with a note that names the new one; and every new name exists."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from moesaic import renamed
from moesaic.align.rewards import Reward
from moesaic.align.stages import Stage
from moesaic.cli import main
from moesaic.cli.app import find_commands
from moesaic.cli.method_options import MethodOptions
from moesaic.data.quality import QualityScore
from moesaic.methods import Method, build, option_names
from moesaic.recipe import Recipe, load_recipe
from moesaic.strict import keys

NOTE = "note: {}: {} is now called {}; the old name works in this version only\n"
KEYS = {".".join(map(str, key)) for key in keys(Recipe)}
OLD, NEW = "train.spike.most", "train.spike.max_rewinds"


def written(folder: Path, text: str) -> Path:
    (folder / "mine.yaml").write_text(text)
    return folder / "mine.yaml"


@pytest.mark.parametrize(("old", "new"), renamed.RECIPE_KEYS.items())
def test_every_renamed_key_of_a_recipe(old: str, new: str) -> None:
    assert new in KEYS and old not in KEYS


def test_an_old_key_in_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "train: {steps: 3, spike: {most: 2, patience: 4}}")
    spike = load_recipe(path).train.spike
    assert (spike.max_rewinds, spike.patience) == (2, 4)
    assert capsys.readouterr().err == NOTE.format(path, OLD, NEW)


@pytest.mark.parametrize("override", [f"{OLD}=7", "train.spike={most: 7}"])
@pytest.mark.parametrize("text", ["train: {steps: 3}", "train: {spike: {most: 2}}", "train: {spike: {max_rewinds: 2}}"])
def test_an_old_key_on_the_command_line_wins_over_the_recipe(tmp_path: Path, capsys, text: str, override: str) -> None:
    recipe = load_recipe(written(tmp_path, text), [override])
    assert recipe.train.spike.max_rewinds == 7
    assert recipe.origin(("train", "spike", "max_rewinds")) == "command line"
    assert NOTE.format("command line", OLD, NEW) in capsys.readouterr().err


def test_the_new_key_wins_over_the_old_one(tmp_path: Path) -> None:
    assert load_recipe(written(tmp_path, "train: {spike: {most: 2, max_rewinds: 3}}")).train.spike.max_rewinds == 3
    assert load_recipe(written(tmp_path, "train: {spike: {most: 2}}"), [f"{NEW}=4"]).train.spike.max_rewinds == 4


def test_a_key_may_move_to_another_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renamed, "RECIPE_KEYS", {"data.length": "train.batch_tokens"})
    assert load_recipe(written(tmp_path, "data: {length: 64}")).train.batch_tokens == 64


def test_a_recipe_without_old_keys_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_recipe(written(tmp_path, "train: {steps: 2}"))
    assert capsys.readouterr().err == ""


def test_an_old_option_of_a_method(capsys: pytest.CaptureFixture[str]) -> None:
    method = build(Method("length", {"most": 5}), QualityScore, "here")
    assert method == build(Method("length", {"max_characters": 5}), QualityScore, "here")
    assert "most is now called max_characters" in capsys.readouterr().err
    options = MethodOptions(["most=5"])
    assert options.make("length", QualityScore, "--quality") == method
    options.check()


def test_every_renamed_option_exists() -> None:
    kinds: dict[str, type] = {"quality": QualityScore, "rewards": Reward, "stages": Stage}
    for kind, methods in renamed.OPTIONS.items():
        for name, options in methods.items():
            assert set(options.values()) <= option_names(name, kinds[kind])


def test_an_old_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--least", "0"], ["--least=0"]):
        assert main(["compress", str(tmp_path), "--out", str(tmp_path / "out"), "--method", "rtn", *words]) == 2
        told = capsys.readouterr().err
        assert NOTE.format("moesaic compress", "--least", "--min-expert-tokens") in told


def test_every_renamed_flag_exists() -> None:
    commands = find_commands()
    for command, flags in renamed.FLAGS.items():
        parameters = import_module(f"moesaic.cli.{commands[command].module}").command.__annotations__
        for flag in flags.values():
            assert flag.removeprefix("--").replace("-", "_") in parameters
