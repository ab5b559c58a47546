"""The suite of multi-hop questions: generated worlds, files in their published forms, and errors that name the line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from moesaic.data.tasks.multihop import world
from moesaic.errors import UserError
from moesaic.evaluate.backends import Answer, Backend
from moesaic.evaluate.exact_match import exact, f1
from moesaic.evaluate.multihop_files import read_items
from moesaic.evaluate.suites import SuiteContext
from moesaic.evaluate.suites import multihop as suite
from moesaic.evaluate.suites.multihop import Multihop

HOTPOT = {
    "_id": "1", "question": "Who?", "answer": "The Bo", "type": "bridge", "supporting_facts": [["B", 0]],
    "context": [["A", ["One.", " Two."]], ["B", ["Three."]]],
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__1_2", "question": "Who?", "answer": "Bo", "answer_aliases": ["Bobo"], "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "A", "paragraph_text": "One.", "is_supporting": True},
        {"idx": 1, "title": "B", "paragraph_text": "Two.", "is_supporting": False},
    ],
}  # fmt: skip


class Reader(Backend):
    """Knows the answers, and gives one if the passages that hold it are in the prompt."""

    def __init__(self, answers: Mapping[str, tuple[str, Sequence[str]]]) -> None:
        self.answers = answers

    def answer(self, conversations: Any, max_tokens: int, on_answer: Any) -> None:
        for number, messages in enumerate(conversations):
            passages, _, question = messages[0]["content"].rpartition("Question: ")
            answer, needed = self.answers[question]
            there = passages and all(f"{title}: " in passages for title in needed)
            on_answer(number, Answer(f"Answer: {answer}." if there else "I do not know", 3))


def test_the_official_normalisation() -> None:
    assert exact("the  Beatles!", ["Beatles"])
    assert exact("U.S.", ["us"])
    assert not exact("Beatle", ["Beatles"])
    assert f1("the red house", ["a red house by the sea"]) == pytest.approx(2 * 1.0 * 0.5 / 1.5)
    assert f1("yes it is", ["yes"]) == 0.0
    assert f1("Bo", ["Ada", "Bo"]) == 1.0
    assert f1("", ["Ada"]) == 0.0


def test_worlds_tell_search_from_reading() -> None:
    options: dict[str, Any] = {"people": 10, "hops": "1,2", "examples": 40}
    made = [
        world(seed, split="test", people=10, hops=(1, 2), phrasings=4, distractors=6, questions=1) for seed in range(9)
    ]
    answers = {q.text: (q.answer, q.supporting) for one in made for q in one.questions}
    found = Multihop(**options).run(None, SuiteContext(backend=Reader(answers)))
    assert found["examples"] == 40
    assert found["closed_exact_match"] == 0.0
    assert found["gold_exact_match"] == 1.0
    # What was retrieved whole is answered, and nothing else: search is measured by itself too.
    assert found["retrieved_exact_match"] == pytest.approx(found["all_found"])
    assert 0.2 < found["all_found"] <= found["recall"] <= 1.0
    assert found["gold_exact_match_low"] < 1.0 == found["gold_exact_match_high"]
    assert found["retrieved_by_kind"]["bridge"] <= 1.0
    assert found == Multihop(**options).run(None, SuiteContext(backend=Reader(answers)))


@pytest.mark.parametrize(
    ("text", "form", "answers", "gold"),
    [
        (json.dumps([HOTPOT], indent=1), "hotpotqa", ("The Bo",), (("B", "Three."),)),
        (json.dumps([HOTPOT | {"evidences": []}]), "2wiki", ("The Bo",), (("B", "Three."),)),
        (json.dumps([MUSIQUE]), "musique", ("Bo", "Bobo"), (("A", "One."),)),
        (json.dumps(MUSIQUE | {"answerable": False}), "musique", ("unknown", "unanswerable"), (("A", "One."),)),
        (json.dumps(MUSIQUE) + "\n" + json.dumps(MUSIQUE) + "\n", "musique", ("Bo", "Bobo"), (("A", "One."),)),
    ],
)
def test_published_forms_are_read(tmp_path: Path, text: str, form: str, answers: Any, gold: Any) -> None:
    (tmp_path / "qa.json").write_text(text)
    found = read_items(tmp_path / "qa.json")
    assert (found.form, found.items[0].answers, found.items[0].gold) == (form, answers, gold)
    assert found.passages[:2] == (
        (("A", "One. Two."), ("B", "Three.")) if form != "musique" else (("A", "One."), ("B", "Two."))
    )


def metaqa(folder: Path) -> Path:
    (folder / "kb.txt").write_text("Up|directed_by|Pete Docter\nUp|release_year|2009\nSoul|directed_by|Pete Docter\n")
    questions = folder / "2-hop" / "qa_test.txt"
    questions.parent.mkdir()
    questions.write_text("who directed [Up]\tPete Docter\nwhat films did [Pete Docter] direct\tUp|Soul\n")
    return questions


def test_metaqa_by_text_and_by_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = metaqa(tmp_path)
    found = read_items(questions)
    assert found.items[1].answers == ("Up", "Soul")
    assert found.passages[0] == ("Up", "Up directed by Pete Docter. Up release year 2009.")

    class Programs:
        def write(self, conversations: Any, *, form: Any, **_: Any) -> list[str]:
            asked = conversations[0][-1]["content"]
            assert ('name: "[Up]"' if "Up" in asked else 'name: "[Pete Docter]"') in form.grammar
            assert "<directed_by>" in form.grammar
            wrong = "what is <release_year> of [Up]"
            return [wrong if "Up" in asked else "what is those whose <directed_by> is [Pete Docter]"]

    monkeypatch.setattr(suite, "writer_for", lambda model, context: Programs())
    result = Multihop(routes="program").run(None, SuiteContext(questions))
    assert (result["form"], result["program_exact_match"]) == ("metaqa", 0.5)
    assert [sample["answer"] for sample in result["samples"]] == ["2009", "Up"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ('[\n{"question": "a"},\n]', ":2: is not a question as hotpotqa has it: lacks 'context'"),
        (f"[{json.dumps(HOTPOT)},\n\n{{broken\n]", ":3: is no JSON"),
        (f"[{json.dumps(HOTPOT)},\n", "ends inside of the array"),
        (f"[{json.dumps(HOTPOT)},\n[1, 2]]", ":2: is no object with a question"),
        ("[]", "holds no questions"),
        (
            f"{json.dumps(MUSIQUE)}\n{json.dumps(MUSIQUE | {'answer': None})}\n",
            ":2: is not a question as musique has it",
        ),
        ("who directed Up\tPete\n", "has no kb.txt"),
    ],
)
def test_a_wrong_file_is_told_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "qa.json").write_text(text)
    with pytest.raises(UserError) as error:
        Multihop().check(tmp_path / "sub" / "qa.json")
    assert said in str(error.value)


def test_wrong_lines_of_metaqa_are_told(tmp_path: Path) -> None:
    questions = metaqa(tmp_path)
    questions.write_text("who directed [Up]\tPete Docter\nwho directed Up\n")
    with pytest.raises(UserError, match=r"qa_test.txt:2: is not a question with its \[entity\]"):
        read_items(questions)
    (tmp_path / "kb.txt").write_text("a|b|c\n\na|b\n")
    with pytest.raises(UserError, match=r"kb.txt:3: is not subject\|relation\|object"):
        read_items(questions)


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='no "open"'):
        Multihop(routes="open")
    with pytest.raises(ValueError, match="hops"):
        Multihop(hops="5")
    (tmp_path / "qa.json").write_text(json.dumps([HOTPOT]))
    with pytest.raises(UserError, match="has no graph"):
        Multihop(routes="program").check(tmp_path / "qa.json")
