"""What a source names: files in a fixed order, builtin texts, tasks whose splits never meet."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from moesaic.data.records import Document, ReadPosition
from moesaic.data.sources import Files, open_source
from moesaic.data.tasks import BLOCK, FIRST_SEED, INDICES, TEST_IN, check_family, families, score, tasks
from moesaic.data.tasks.families import PRESETS, UNSUITABLE, split_names
from moesaic.errors import UserError
from moesaic.recipe_sections import SourceSection


def texts(path: str, **more: object) -> list[str]:
    source = SourceSection(name="s", path=path, **more)  # type: ignore[arg-type]
    return [record.text for record in open_source(source).records() if isinstance(record, Document)]


class TestFiles:
    def test_folders_and_patterns_are_read_by_name_and_without_hidden_files(self, tmp_path: Path) -> None:
        for name in ("b.txt", "a.txt", "sub/c.md", ".hidden", ".git/d.txt"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        assert texts(str(tmp_path)) == ["a.txt", "b.txt", "sub/c.md"]
        assert texts(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
        assert texts(f"{tmp_path}/**") == ["a.txt", "b.txt", "sub/c.md"]
        assert texts(f"{tmp_path}/sub/c.md") == ["sub/c.md"]

    def test_reads_on_from_any_record_of_any_file(self, tmp_path: Path) -> None:
        for number in range(3):
            (tmp_path / f"{number}.txt").write_text("|".join(f"{number}-{n}" for n in range(3)))
        corpus = open_source(SourceSection(name="s", path=str(tmp_path), separator="|"))
        whole = list(corpus.records())
        assert len(whole) == 9
        for number, record in enumerate(whole):
            assert list(corpus.records(record.after)) == whole[number + 1 :]

    def test_what_a_kind_of_file_has_not_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        (tmp_path / "b.jsonl.gz").write_bytes(b"b")
        for path in (str(tmp_path), str(tmp_path / "a.txt"), "builtin:stdlib", "builtin:sums"):
            with pytest.raises(UserError, match=r"data.sources: s: columns: .*fields"):
                texts(path, columns=("edu",))
        assert open_source(SourceSection(name="s", path=f"{tmp_path}/*.jsonl.gz", columns=("edu",)))
        for path in (f"{tmp_path}/b*", "builtin:sums"):
            with pytest.raises(UserError, match=r"data.sources: s: separator: .* text"):
                texts(path, separator="|")

    def test_a_sample_comes_from_many_files(self, tmp_path: Path) -> None:
        for number in range(50):
            (tmp_path / f"{number:02d}.txt").write_text(f"{number} " * 40_000)
        corpus = open_source(SourceSection(name="s", path=str(tmp_path)))
        sample = list(corpus.sample(2_000_000, 0))
        assert len(sample) > 10
        assert sum(map(len, sample)) < 2_300_000
        assert sample == list(corpus.sample(2_000_000, 0))

    def test_state_changes_with_the_files(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        before = open_source(SourceSection(name="s", path=str(tmp_path))).state()
        (tmp_path / "b.txt").write_text("b")
        assert open_source(SourceSection(name="s", path=str(tmp_path))).state() != before

    @pytest.mark.parametrize(
        ("path", "told"),
        [
            ("nowhere", "nowhere: no such file or folder"),
            ("no/*.txt", "nothing matches"),
            ("empty", "holds no data"),
            ("builtin:stdlb", 'there is no "builtin:stdlb"; did you mean stdlib?'),
            ("builtin:reasoning_gym/gdc", 'no family of tasks "gdc"; did you mean gcd?'),
            ("builtin:reasoning_gym/codeio", "differ from process to process"),
            ("builtin:reasoning_gym/rubiks_cube", "gives no answers"),
        ],
    )
    def test_mistakes_are_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, told: str) -> None:
        monkeypatch.chdir(tmp_path)
        Path("empty").mkdir()
        Path("empty/a.txt").touch()
        with pytest.raises(UserError, match="data.sources: s: ") as caught:
            open_source(SourceSection(name="s", path=path))
        assert told in str(caught.value)


class TestStandardLibrary:
    def test_holds_the_modules_and_no_tests(self) -> None:
        corpus = open_source(SourceSection(name="s", path="builtin:stdlib"))
        assert isinstance(corpus, Files)
        names = [path.name for path in corpus.paths]
        assert {"ast.py", "dataclasses.py", "typing.py"} <= set(names)
        assert not any("test" in path.parts or "site-packages" in path.parts for path in corpus.paths)
        assert corpus.size > 5_000_000
        assert corpus.done(ReadPosition(len(names))) == corpus.size


class TestTasks:
    def test_seeds_of_the_splits_cannot_meet(self) -> None:
        last = FIRST_SEED["train"] + INDICES * BLOCK
        assert last <= FIRST_SEED["test"]

    @pytest.mark.parametrize("family", ["gcd", "coin_flip", "syllogism", "gsm_symbolic"])
    def test_questions_of_the_splits_do_not_meet(self, family: str) -> None:
        # coin_flip makes so few different questions that seeds alone would not keep them apart.
        train = {tasks(family, "train", index).question for index in range(60)}
        test = {tasks(family, "test", index).question for index in range(60)}
        assert not train & test
        assert len(test) > 60 // TEST_IN // 4

    def test_are_the_same_in_every_process(self) -> None:
        names = sorted({family for preset in PRESETS.values() for family in preset})
        program = f"""
            from moesaic.data.tasks import tasks
            for family in {names}:
                for split in ("train", "test"):
                    task = tasks(family, split, 7)
                    print(repr((task.question, task.answer)))
        """
        lines = "\n".join(
            line.strip(" ") if line.strip().startswith("from") else line[12:] for line in program.split("\n")
        )
        outs = [
            subprocess.run(
                [sys.executable, "-c", lines],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        ]
        assert outs[0] == outs[1]
        assert len(outs[0].splitlines()) == 2 * len(names)

    def test_score(self) -> None:
        task = tasks("gcd", "test", 3)
        assert score(task, task.answer) == 1.0
        assert score(task, "no number") < 0.1
        assert score(task, None) == 0.0

    def test_all_families_are_known_and_presets_usable(self) -> None:
        assert not set(families()) & set(UNSUITABLE)
        named = {family.partition(":")[0] for preset in PRESETS.values() for family in preset}
        assert named <= set(families())

    def test_a_source_of_tasks_takes_families_in_turn_and_reads_on(self) -> None:
        corpus = open_source(SourceSection(name="s", path="builtin:reasoning_gym/gcd,lcm", documents=6))
        whole = list(corpus.records())
        found = [record.text for record in whole if isinstance(record, Document)]
        assert len(found) == 6
        assert all(("GCD" in text or "Divisor" in text) == (n % 2 == 0) for n, text in enumerate(found))
        assert list(corpus.records(whole[2].after)) == whole[3:]
        first = tasks("gcd", "train", 0)
        assert found[0] == f"Question: {first.question}\nAnswer: {first.answer}\n"


class TestSolutions:
    SUMS = "chain_sum:min_terms=3,max_terms=4,min_digits=1,max_digits=1"

    def test_a_share_is_worked_out_line_by_line_and_judged_by_its_last_line(self) -> None:
        found = [tasks(f"{self.SUMS},worked=0.5", "train", n) for n in range(80)]
        worked = [task for task in found if task.solution != task.answer]
        assert 25 < len(worked) < 55
        for task in worked:
            assert task.solution is not None and task.answer is not None
            *steps, last = task.solution.splitlines()
            assert last == task.answer and len(steps) == task.metadata["num_terms"] - 1
            for before, after in zip(steps, [*steps[1:], last], strict=True):
                sides = before.split("=")
                assert eval(sides[0]) == int(sides[1]) and after.startswith(sides[1])
            assert score(task, task.solution) == 1.0 and score(task, f"{task.solution}\n7{task.answer}") < 1.0

    @pytest.mark.parametrize("family", ["gcd", "gcd:min_numbers=3,max_numbers=4", "leg_counting", "letter_counting"])
    def test_every_step_of_a_working_is_true_and_leads_to_the_answer(self, family: str) -> None:
        for n in range(60):
            task = tasks(f"{family}{',' if ':' in family else ':'}worked=1", "train", n)
            assert task.solution is not None and score(task, task.solution) == 1.0
            *steps, last = task.solution.splitlines()
            assert last == task.answer and steps
            if family.startswith("gcd"):
                left = [re.fullmatch(r"(\d+) mod (\d+)=(\d+)", step).groups() for step in steps]  # type: ignore[union-attr]
                assert all(int(a) % int(b) == int(c) for a, b, c in left) and left[-1][1:] == (last, "0")
            elif family == "leg_counting":
                found = [re.fullmatch(r".* (\d+\*\d+)=(\d+), (\d+)", step) for step in steps]
                legs = [int(one[2]) for one in found if one and eval(one[1]) == int(one[2])]
                assert [int(one[3]) for one in found if one] == list(accumulate(legs))
                assert found[-1] and found[-1][3] == last and len(legs) == len(task.metadata["animals"])
            else:
                words = [step.split(": ") for step in steps]
                assert [word.replace(" ", "") for word, _ in words] == [w.lower() for w in task.metadata["span"]]
                seen = accumulate(word.count(task.metadata["target_letter"]) for word, _ in words)
                assert [int(count) for _, count in words] == list(seen) and words[-1][1] == last

    def test_without_the_option_solutions_are_the_answers(self) -> None:
        assert all((task := tasks(self.SUMS, "test", n)).solution == task.answer for n in range(20))

    @pytest.mark.parametrize("family", ["lcm:worked=0.5", "chain_sum:worked=2", "chain_sum:worked=often"])
    def test_a_share_that_cannot_be_is_refused(self, family: str) -> None:
        with pytest.raises(UserError, match="worked"):
            check_family(family, "here")

    def test_names_and_options_are_told_apart(self) -> None:
        assert split_names("a, b:x=1,y=2,c") == ["a", "b:x=1,y=2", "c"]
