"""Recipes: what is written is what is run, or an error that says which key, in which file, and what was meant."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from moesaic.errors import UserError
from moesaic.methods import Method
from moesaic.recipe import Recipe, load_recipe
from moesaic.recipe_sections import PhaseSection, SourceSection, TrainSection
from moesaic.strict import keys

Load = Callable[..., Recipe]
KNOWN = keys(Recipe)
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes | dict[str, Any], *overrides: str) -> Recipe:
        if isinstance(text, dict):
            text = json.dumps(text, ensure_ascii=False)  # JSON is YAML, and quotes what is text
        Path("mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_recipe("mine.yaml", list(overrides))

    return load


def message(load: Load, text: str | bytes | dict[str, Any], *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestReading:
    def test_what_is_not_written_is_the_default(self, load: Load) -> None:
        recipe = load("train: {steps: 3}")
        assert recipe.train == TrainSection(steps=3)
        assert recipe.model == Recipe().model

    def test_every_kind_of_value(self, load: Load) -> None:
        recipe = load("""
            model: {experts: [4, 8], router: {score: softmax}}
            data:
              sources: [{name: code, path: "builtin:python", weight: 2}]
              phases: [{share: 1, weights: {code: 1}}]
            align: {stages: [{name: sft, steps: 2}], invariant: false}
            optimizer: {name: adamw, lr: 3e-4}
            schedule: cosine
        """)
        assert recipe.model.experts == (4, 8)
        assert recipe.model.router.score == "softmax"
        assert recipe.data.sources == (SourceSection(name="code", path="builtin:python", weight=2.0),)
        assert recipe.data.phases == (PhaseSection(share=1.0, weights={"code": 1.0}),)
        assert recipe.align.stages == (Method("sft", {"steps": 2}),)
        assert recipe.align.invariant is False
        assert recipe.optimizer == Method("adamw", {"lr": 3e-4})
        assert recipe.schedule == Method("cosine")

    @pytest.mark.parametrize(
        ("written", "number"),
        [("1e-4", 1e-4), ("1E5", 1e5), ("2.5e3", 2500.0), (".5", 0.5), ("3", 3.0), ("1_000", 1000.0), ("+2.", 2.0)],
    )
    def test_numbers_as_people_write_them(self, load: Load, written: str, number: float) -> None:
        assert load(f"train: {{clip: {written}}}").train.clip == number
        assert load("train: {}", f"train.clip={written}").train.clip == number

    def test_a_whole_number_is_a_number_but_not_the_other_way(self, load: Load) -> None:
        clip = load("train: {clip: 2}").train.clip
        assert clip == 2.0
        assert isinstance(clip, float)
        assert "expected a whole number, found 2.0" in message(load, "train: {steps: 2.0}")

    def test_words_that_other_yaml_makes_something_of_are_text(self, load: Load) -> None:
        for word in ("no", "on", "yes", "off", "2024-01-01", "12:30", "=", "1.2.3"):
            assert load(f"model: {{family: {word}}}").model.family == word

    def test_anchors_and_merges(self, load: Load) -> None:
        recipe = load(
            """
            data:
              sources:
                - &first {name: a, path: a.txt, weight: 2}
                - {<<: *first, name: b}
            align:
              stages: [&stage {name: sft, steps: 4}, *stage]
            """,
            "align.stages.0.steps=8",
        )
        assert [(source.name, source.weight) for source in recipe.data.sources] == [("a", 2.0), ("b", 2.0)]
        assert [stage.options["steps"] for stage in recipe.align.stages] == [8, 4]

    def test_is_frozen(self, load: Load) -> None:
        with pytest.raises(ValidationError):
            load("train: {}").train.steps = 3

    def test_a_dump_is_plain_and_is_the_same_recipe(self, load: Load) -> None:
        recipe = load(
            "{model: {experts: [4, 8]}, schedule: {name: wsd, decay: 0.2}, align: {stages: [{name: policy, steps: 1}]}}"
        )
        dumped = recipe.dump()
        assert json.loads(json.dumps(dumped)) == dumped
        assert dumped["schedule"] == {"name": "wsd", "decay": 0.2}
        assert load(json.dumps(dumped)) == recipe


class TestOverrides:
    def test_reach_any_depth(self, load: Load) -> None:
        recipe = load(
            "align: {stages: [{name: sft, steps: 3}, {name: policy, steps: 4}]}",
            "align.stages.1.steps=50",
            "model.router.groups=2",
            "optimizer.lr=1e-3",
            "optimizer.name=muon",
            "data.sources=[{name: a, path: a=b.txt}]",
        )
        assert [stage.options["steps"] for stage in recipe.align.stages] == [3, 50]
        assert recipe.model.router.groups == 2
        assert recipe.optimizer == Method("muon", {"lr": 1e-3})
        assert recipe.data.sources[0].path == "a=b.txt"

    def test_replace_what_is_empty(self, load: Load) -> None:
        assert load("train:\ndata:\n  seed: 1", "train.steps=4", "data={}").train.steps == 4

    @same_folder
    @given(values=st.lists(st.integers(1, 10**6), min_size=1, max_size=5))
    def test_the_later_wins(self, load: Load, values: list[int]) -> None:
        assert load("train: {steps: 7}", *(f"train.steps={value}" for value in values)).train.steps == values[-1]

    @pytest.mark.parametrize(
        ("override", "told"),
        [
            ("train.steps", 'command line: "train.steps" is not of the form section.key=value'),
            ("=3", 'command line: "=3" is not of the form section.key=value'),
            ("train..steps=3", 'command line: "train..steps=3" is not of the form section.key=value'),
            ("train.stps=3", "command line: train.stps: no such key; did you mean train.steps?"),
            ("trian.steps=3", "command line: trian: no such key; did you mean train?"),
            ("train.steps='3'", 'command line: train.steps: expected a whole number, found text "3"'),
            ("train.steps.more=3", "command line: train.steps.more: train.steps is 10, and has no keys"),
            (
                "align.stages.2.steps=3",
                "command line: align.stages.2.steps: there is no such entry; the recipe has "
                "align.stages.0 to align.stages.1",
            ),
            ("align.stages.x.steps=3", "command line: align.stages.x.steps: there is no such entry; the recipe has"),
            ("data.sources.0.path=a", "command line: data.sources: expected a list, found keys with values"),
            ("train.steps=[1", "command line: train.steps: not valid YAML at line 1, column 3:"),
        ],
    )
    def test_that_are_wrong(self, load: Load, override: str, told: str) -> None:
        file = "{train: {steps: 10}, align: {stages: [{name: sft, steps: 3}, {name: sft, steps: 3}]}}"
        assert message(load, file, override).startswith(told)

    def test_are_blamed_only_for_what_they_wrote(self, load: Load) -> None:
        assert message(load, "train: {steps: x}", "train.clip=2").startswith("mine.yaml: train.steps: ")
        assert message(load, "train: {steps: 3}", "train.clip=x").startswith("command line: train.clip: ")
        assert message(load, "data: {}", "train.clip=x").startswith("command line: train.clip: ")


class TestWrongKeysAndTypes:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("train: {warmup_step: 1}", "train.warmup_step: no such key; did you mean train.warmup_steps?"),
            ("trai: {steps: 1}", "trai: no such key; did you mean train?"),
            ("train: {bias_rate: x}", "train.bias_rate: no such key; did you mean balance.bias_rate?"),
            ("train: {qqq: x}", "train.qqq: no such key; known here: init, data, objective,"),
            ("model: {router: {top_group: 1}}", "model.router.top_group: no such key; did you mean model.router.top_g"),
            (
                "data: {phases: [{share: 1, weght: {}}]}",
                "data.phases.0.weght: no such key; did you mean data.phases.0.weights?",
            ),
            ("train: {steps: '3'}", 'train.steps: expected a whole number, found text "3"'),
            ("train: {steps: true}", "train.steps: expected a whole number, found true"),
            ("train: {steps: }", "train.steps: expected a whole number, found nothing (null)"),
            ("train: {steps: [1]}", "train.steps: expected a whole number, found a list"),
            ("train: {steps: 0}", "train.steps: must be greater than 0, found 0"),
            ("train: {clip: '1.5'}", 'train.clip: expected a number, found text "1.5"'),
            ("train: {clip: true}", "train.clip: expected a number, found true"),
            ("train: {clip: .inf}", "train.clip: expected a finite number, found inf"),
            ("train: {dtype: bf16}", "train.dtype: expected one of auto, float32, bfloat16, float16, fp8; found"),
            ("align: {invariant: yes}", 'align.invariant: expected true or false, found text "yes"'),
            ("align: {invariant: 1}", "align.invariant: expected true or false, found 1"),
            ("align: {stages: 3}", "align.stages: expected a list, found 3"),
            ("align: {stages: [{steps: 1}]}", "align.stages.0: names no method"),
            ("data: {tokenizer: 3}", "data.tokenizer: expected text, found 3"),
            ("data: {phases: [{share: 1, weights: {a: x}}]}", "data.phases.0.weights.a: expected a number"),
            ("data: {phases: [{share: 1.5, weights: {}}]}", "data.phases.0.share: must be at most 1, found 1.5"),
            ("model: {experts: many}", "model.experts: expected a whole number or a list, found"),
            ("model: {experts: [4, x]}", 'model.experts.1: expected a whole number, found text "x"'),
            ("model: {experts: []}", "model.experts: must have at least 1 entry, found 0"),
            ("train: 3", "train: expected keys with values, found 3"),
            ("schedule: 3", "schedule: expected the name of a method, or its name and options, found 3"),
            ("schedule: {decay: 3}", "schedule: names no method; write name: and then its options"),
            ("data: {quality: {bits: 3}}", "data.quality: names no method"),
            ("compress: {method: gptq}", "compress: no section of a recipe; moesaic compress takes its method"),
            ("parallel: {shard: 2}", "parallel.shard: no such key"),
            ("train: {steps: x, clip: y, seed: z}", 'train.steps: expected a whole number, found text "x". 2 more'),
        ],
    )  # fmt: skip
    def test_are_named(self, load: Load, text: str, told: str) -> None:
        assert message(load, text).startswith(f"mine.yaml: {told}")

    @same_folder
    @given(where=st.sampled_from(sorted({key[:-1] for key in KNOWN if "*" not in key})), data=st.data())
    def test_no_unknown_key_ever_passes(self, load: Load, where: tuple[str, ...], data: st.DataObject) -> None:
        alphabet = string.ascii_letters + string.digits + "_- é"
        known = {key[-1] for key in KNOWN if key[:-1] == where}
        name = data.draw(st.text(alphabet, min_size=1, max_size=20).filter(lambda name: name not in known))
        value = data.draw(st.sampled_from([1, "x", None, [], {}]))
        document: Any = {name: value}
        for part in reversed(where):
            document = {part: document}
        assert message(load, document).startswith(f"mine.yaml: {'.'.join([*where, name])}: no such key")

    @same_folder
    @given(data=st.data())
    def test_no_value_of_another_type_ever_passes(self, load: Load, data: st.DataObject) -> None:
        path, kind = data.draw(st.sampled_from(list(plain_fields(Recipe))))
        values: dict[type, st.SearchStrategy[Any]] = {
            int: st.integers(),
            float: st.floats(allow_nan=False, allow_infinity=False),
            bool: st.booleans(),
            str: st.text(string.ascii_letters),
            list: st.just([1]),
            dict: st.just({"a": 1}),
        }
        accepted = {int: {int}, float: {int, float}, bool: {bool}, str: {str}}[kind]
        wrong = data.draw(st.sampled_from([value for value in values if value not in accepted]))
        document: Any = data.draw(values[wrong])
        for part in reversed(path):
            document = {part: document}
        told = message(load, document)
        assert told.startswith(f"mine.yaml: {'.'.join(path)}: expected ")
        assert ", found " in told


def plain_fields(kind: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], type]]:
    """The keys that hold one number, text, or true and false."""
    for name, field in kind.model_fields.items():
        if field.annotation in (int, float, bool, str):
            yield (*above, name), field.annotation
        elif isinstance(field.annotation, type) and get_origin(field.annotation) is None:
            if issubclass(field.annotation, BaseModel):
                yield from plain_fields(field.annotation, (*above, name))
        assert ... not in get_args(field.annotation) or get_origin(field.annotation) is tuple


class TestWrongFiles:
    def test_that_is_not_there(self, load: Load, tmp_path: Path) -> None:
        load("train: {}")
        with pytest.raises(UserError, match=r"^min.yaml: no such file; did you mean mine.yaml\?$"):
            load_recipe("min.yaml")
        with pytest.raises(UserError, match=r"^no/folder/x.yaml: no such file$"):
            load_recipe("no/folder/x.yaml")
        with pytest.raises(UserError, match="cannot be read: Is a directory"):
            load_recipe(tmp_path)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "mine.yaml: empty; a recipe has sections. Known: model, data,"),
            ("# only a comment\n", "mine.yaml: empty"),
            ("- train\n", "mine.yaml: expected sections with keys and values, found a list"),
            ("train", 'mine.yaml: expected sections with keys and values, found text "train"'),
            ("train:\n  steps: 3\n\tclip: 2\n", "mine.yaml: not valid YAML at line 3, column 1: found character '\\t'"),
            ("train:\n  steps: [1, 2\n", "mine.yaml: not valid YAML at line 3, column 1"),
            ("train: *nothing", "mine.yaml: not valid YAML at line 1, column 8: found undefined alias 'nothing'"),
            ("a: 1\n---\nb: 2\n", "mine.yaml: not valid YAML at line 2, column 1"),
            ("train: !!python/object/apply:os.getcwd []", "mine.yaml: not valid YAML at line 1, column 8"),
            ("train: !!binary aGk=", "mine.yaml: not valid YAML at line 1, column 8"),
            ("train: {seed: 1}\ntrain: {seed: 2}\n", 'mine.yaml: the key "train" of line 1 is written again at line 2'),
            ("train:\n  steps: 1\n  steps: 2\n", 'mine.yaml: the key "steps" of line 2 is written again at line 3'),
            ("1: {}", "mine.yaml: the key 1 is not text"),
            ("train: &loop [*loop]", "mine.yaml: nested too deeply"),
            ("train: " + "[" * 5000, "mine.yaml: nested too deeply"),
            ("model: {family: " + "[" * 300 + "]" * 300 + "}", "mine.yaml: nested too deeply"),
            ('train: "\\ud800"', "mine.yaml: not valid YAML"),
            ("train: " + "9" * 5000, "mine.yaml: not valid YAML"),
            (b"train: \xff\xfe", "mine.yaml: not a text file"),
            (b"train: \x00", "mine.yaml: not valid YAML"),
        ],
    )  # fmt: skip
    def test_that_is_no_recipe(self, load: Load, text: str | bytes, told: str) -> None:
        assert message(load, text).startswith(told)

    def test_aliases_that_stand_for_billions(self, load: Load) -> None:
        lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
        lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
        assert "once its aliases are written out" in message(load, "\n".join(lines))

    @same_folder
    @given(text=st.one_of(st.text(), st.text("{}[]:,-&*!|>'\"%@#?<~ \n\tae1.0_"), st.binary().map(repr)))
    def test_any_text_gives_a_recipe_or_a_clear_error(self, load: Load, text: str) -> None:
        for overrides in ((), (text,), (f"train.steps={text}",), (f"{text}=1",)):
            try:
                recipe = load(text if not overrides else "train: {}", *overrides)
            except UserError as error:
                assert error.problem
                assert error.place
            else:
                assert math.isfinite(recipe.train.steps)


def test_which_keys_the_command_line_names(tmp_path):
    for text in ("model: {layers: 2, heads: 4}", "train: {steps: 3}"):
        (tmp_path / "recipe.yaml").write_text(text)
        recipe = load_recipe(tmp_path / "recipe.yaml", ["model.layers=6", "model.router.scale=2.0", "train.seed=1"])
        assert recipe.overridden_keys("model") == ["model.layers", "model.router"]
        assert recipe.overridden_keys("data") == []
