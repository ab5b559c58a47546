"""Methods are found by their file's name and made of the options beside it in a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from moesaic.errors import UserError
from moesaic.methods import Method, build, known
from moesaic.recipe import load_recipe
from moesaic.serve.core.kv_policies import KVPolicy


def classes(*names: str) -> str:
    """A file of schedules that have no options."""
    text = "from dataclasses import dataclass\n\nfrom toy_schedules import Schedule\n"
    return text + "".join(f"\n@dataclass(frozen=True)\nclass {name}(Schedule):\n    pass\n" for name in names)


FILES = {
    "__init__": """
        class Schedule:
            def rate(self, step: int) -> float:
                raise NotImplementedError

        class Kept:
            pass
    """,
    "cosine": """
        from __future__ import annotations

        from dataclasses import dataclass, field
        from typing import Literal

        from toy_schedules import Kept, Schedule

        @dataclass(frozen=True)
        class Cosine(Schedule):
            period: int
            floor: float = 0.0
            shape: Literal["half", "full"] = "half"
            restarts: tuple[int, ...] = ()
            weights: dict[str, float] = field(default_factory=dict)

            def __post_init__(self) -> None:
                if self.floor > 1:
                    raise ValueError("floor must not be above 1")

            def rate(self, step: int) -> float:
                return self.floor
    """,
    "constant": classes("_Unfinished", "Constant"),
    "needs_more": "import a_package_that_is_not_there",
    "two": classes("One", "Other"),
    "_shared": "",
}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    folder = tmp_path / "toy_schedules"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    import toy_schedules  # type: ignore[import-not-found]

    yield toy_schedules.Schedule
    for name in [name for name in sys.modules if name.split(".")[0] == "toy_schedules"]:
        del sys.modules[name]


def test_every_file_but_hidden_ones_is_a_method(base: type) -> None:
    assert known(base) == ["constant", "cosine", "needs_more", "two"]


def test_options_become_fields(base: type) -> None:
    options = {"period": 3, "floor": 1, "restarts": [4, 5], "weights": {"a": 2}}
    cosine: Any = build(Method("cosine", options), base, "here")
    assert isinstance(cosine, base)
    assert (cosine.period, cosine.floor, cosine.shape) == (3, 1.0, "half")
    assert cosine.restarts == (4, 5)
    assert cosine.weights == {"a": 2.0}
    assert isinstance(build(Method("constant"), base, "here"), base)


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("cosin", {}, 'here: k.name: no such method "cosin"; did you mean cosine? Known: constant, cosine,'),
        ("zzz", {}, 'here: k.name: no such method "zzz"; known: constant, cosine, needs_more, two'),
        ("../os", {}, 'here: k.name: no such method "../os"; known:'),
        ("_shared", {}, 'here: k.name: no such method "_shared"'),
        ("cosine", {}, "here: k.period: missing"),
        ("cosine", {"perod": 3}, "here: k.perod: no such option of cosine; did you mean k.period? 1 more problem"),
        ("cosine", {"period": "3"}, 'here: k.period: expected a whole number, found text "3"'),
        ("cosine", {"period": 3.0}, "here: k.period: expected a whole number, found 3.0"),
        ("cosine", {"period": 3, "floor": float("nan")}, "here: k.floor: expected a finite number, found nan"),
        ("cosine", {"period": 3, "shape": "hal"}, 'here: k.shape: expected one of half, full; found text "hal"; did'),
        ("cosine", {"period": 3, "restarts": [1, "x"]}, 'here: k.restarts.1: expected a whole number, found text "x"'),
        ("cosine", {"period": 3, "floor": 2}, "here: k: floor must not be above 1"),
        ("constant", {"x": 1}, "here: k.x: no such option of constant"),
        ("needs_more", {}, "here: k: needs_more needs the package a_package_that_is_not_there, which is not installed"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_told(base: type, name: str, options: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError) as caught:
        build(Method(name, options), base, "here", ("k",))
    assert str(caught.value).startswith(told)


def test_our_own_mistakes_are_not_the_users(base: type) -> None:
    with pytest.raises(AssertionError, match="must define one Schedule, not 2"):
        build(Method("two"), base, "here")


def test_a_recipe_builds_what_it_names_and_knows_who_wrote_it(base: type, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schedule: {name: cosine, period: 3, flor: 0.1}\nalign: {stages: [constant, {name: cosin}]}\n")
    recipe = load_recipe(path, ["schedule.shap=full"])
    with pytest.raises(
        UserError, match=r"mine.yaml: schedule.flor: no such option of cosine; did you mean schedule.floor\?"
    ):
        recipe.build("schedule", base)
    recipe = load_recipe(path, ["schedule={name: cosine, period: 3}", "schedule.shap=full"])
    with pytest.raises(UserError, match=r"^command line: schedule.shap: no such option of cosine"):
        recipe.build("schedule", base)
    assert isinstance(recipe.build("align.stages.0", base), base)
    with pytest.raises(UserError, match=r"mine.yaml: align.stages.1.name: no such method"):
        recipe.build("align.stages.1", base)


def test_a_name_of_the_last_version_still_works_and_says_the_new_one(capsys):
    policy = build(Method("quantised", {"bits": 4}), KVPolicy, "command line")
    assert type(policy).__name__ == "Quantized" and policy.bits == 4
    assert "quantised is now called quantized" in capsys.readouterr().err
