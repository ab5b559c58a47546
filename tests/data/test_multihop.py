"""Multi-hop worlds: the same from the same seed, splits without common names, and answers that the documents hold."""

from __future__ import annotations

from typing import Any

import pytest

from moesaic.data.tasks.multihop import KINDS, UNKNOWN, spoken, world
from moesaic.data.tasks.multihop_facts import COMPANY, WORK, Split


def test_a_world_is_its_seed() -> None:
    assert world(3) == world(3)
    assert world(3) != world(4)


def test_splits_share_no_names() -> None:
    def words(split: Split) -> set[str]:
        titles = [title for seed in range(8) for title, _ in world(seed, split=split, distractors=2).documents]
        ordinary = {word for form in (*WORK, *COMPANY, "Notes, part 1") for word in form.split()}
        return {word for title in titles for word in title.split()} - ordinary

    assert len(words("train")) > 100
    assert words("train") & words("test") == set()


@pytest.mark.parametrize("people", [6, 30])
def test_titles_are_unique_and_facts_are_told(people: int) -> None:
    made = world(1, people=people)
    texts = dict(made.documents)
    assert len(texts) == len(made.documents)
    for subject, _, value in made.triples:
        assert spoken(value) in texts[subject]


def test_every_kind_is_asked() -> None:
    asked = world(2, people=20, hops=(1, 2, 3, 4)).questions
    assert {question.kind for question in asked} == set(KINDS)
    assert {question.hops for question in asked if question.kind == "bridge"} == {1, 2, 3, 4}
    assert {question.answer for question in asked if question.kind == "yes_no"} == {"yes", "no"}
    assert len({question.text for question in asked}) == len(asked)
    assert all((question.answer == UNKNOWN) == (question.kind == "unanswerable") for question in asked)


def test_answers_stand_in_the_last_supporting_document() -> None:
    """Of a bridge: each document on the way names the next, and the last one the answer."""
    made = world(5, people=20, hops=(1, 2, 3, 4), kinds=("bridge",))
    texts = dict(made.documents)
    for question in made.questions:
        assert len(question.supporting) == question.hops
        for title, after in zip(question.supporting, (*question.supporting[1:], question.answer), strict=True):
            assert after in texts[title]
        assert question.answer not in question.text


def test_one_phrasing_is_a_small_vocabulary() -> None:
    def forms(phrasings: int) -> int:
        made = world(0, people=8, phrasings=phrasings, kinds=("bridge",), questions=20)
        return len({" ".join(w for w in q.text.split() if w.islower()) for q in made.questions})

    assert forms(1) < forms(4)


def test_a_world_of_few_relations_and_short_names() -> None:
    few = ("birthplace", "country", "teacher")
    options: dict[str, Any] = {
        "people": 6,
        "kinds": ("bridge",),
        "distractors": 0,
        "relations": few,
        "short_names": True,
    }
    made = world(4, hops=(1, 2), **options)
    assert {relation for _, relation, _ in made.triples} == set(few)
    names = {name for triple in made.triples for name in triple[::2]}
    assert all(len(name) == 4 and name.isalpha() for name in names) and len(names) > 8
    assert {question.hops for question in made.questions} == {1, 2}
    others = world(4, split="test", **options)
    assert not names & {name for triple in others.triples for name in triple[::2]}
