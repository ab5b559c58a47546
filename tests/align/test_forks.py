"""APAR from data to answer: structured answers are taken apart, a model learns from them, forks, and answers right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic
from moesaic.align.align import align
from moesaic.align.conversation import read_conversation
from moesaic.align.forks import child_token, conversations, forked, only_the_branch
from moesaic.errors import UserError
from moesaic.serve.core.branches import CHILD, FORK, answer_in_branches
from moesaic.serve.core.request import Sampling
from tests.align.made import ADAMW, recipe_of
from tests.serve.made import talking_model

LIST = """Three spices:

1. **Salt:** it is taken from the sea or from mines.
2. Pepper. Dried berries of a vine, ground just before use.
3. Saffron - the dearest of them, and it colours the dish.

That is all."""
PARAGRAPHS = """Bees live in colonies. A colony has one queen and many workers.

They visit flowers. There they collect nectar, which becomes honey.

Winter is hard."""


def test_lists_and_paragraphs_are_taken_apart():
    spices = forked(LIST)
    assert spices.branches == (
        " it is taken from the sea or from mines.",
        " Dried berries of a vine, ground just before use.",
        " the dearest of them, and it colours the dish.",
    )
    assert spices.parent == (
        f"Three spices:\n\n1. **Salt:**{FORK}\n2. Pepper.{FORK}\n3. Saffron -{FORK}\n\nThat is all."
    )
    bees = forked(PARAGRAPHS)
    assert bees.branches == (
        " A colony has one queen and many workers.",
        " There they collect nectar, which becomes honey.",
    )
    assert spices.joined == LIST and bees.joined == PARAGRAPHS
    assert forked("One sentence, and no more of it.").branches == ()
    assert spices.beginnings()[1] == f"Three spices:\n\n1. **Salt:**{FORK}\n2. Pepper.{FORK}{CHILD}"


@given(st.lists(st.sampled_from(["- ", "1. ", "a word ", "Salt: ", "So it is. ", "\n", "\n\n", "it goes on and on "])))
@settings(max_examples=200, deadline=None)
def test_nothing_is_lost(pieces: list[str]):
    answer = "".join(pieces)
    parts = forked(answer)
    assert parts.joined == answer
    assert parts.parent.count(FORK) == len(parts.branches) != 1


def test_a_branch_learns_only_itself(tmp_path):
    tokenizer = moesaic.load(talking_model(tmp_path)).tokenizer
    messages = [{"role": "user", "content": "Spices?"}, {"role": "assistant", "content": LIST}]
    whole = [read_conversation(tokenizer, one)[0] for one in conversations(messages)]
    said = [only_the_branch(one, child_token(tokenizer)) for one in whole]
    learned = [tokenizer.decode([t for t, learn in zip(s.tokens, s.learn) if learn], special=True) for s in said]
    assert learned[0].startswith(forked(LIST).parent)
    for text, branch in zip(learned[1:], forked(LIST).branches, strict=True):
        assert text.startswith(branch) and FORK not in text and "<|endoftext|>" in text
    # A branch is asked for as it was learned: its tokens up to the child token are those of the parent.
    child = child_token(tokenizer)
    for one in whole[1:]:
        begins = one.tokens.index(child)
        assert one.tokens[:begins] == whole[0].tokens[:begins]
    with pytest.raises(UserError, match="already"):
        conversations([*messages[:-1], {"role": "assistant", "content": f"a{FORK}b"}])


DETAILS = [
    "yes or no, as you like it.",
    "a number; and yes or no.",
    "value as you like it; no.",
    "name is a number, yes.",
]


def answer_of(numbers: list[int]) -> str:
    return "\n".join(f"- {n}: {DETAILS[n]}" for n in numbers)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: Any) -> Path:
    """A model that lists what it is asked for, taught with forks."""
    folder, draws = tmp_path_factory.mktemp("taught"), random.Random(0)
    lines = []
    for _ in range(300):
        numbers = draws.sample(range(len(DETAILS)), 3)
        lines.append({"prompt": " ".join(map(str, numbers)), "response": answer_of(numbers)})
    (folder / "lists.jsonl").write_text("\n".join(map(json.dumps, lines)))
    base = talking_model(folder / "base")
    stage = (
        f'{{name: sft, steps: 100, lr: 0.004, forks: true, data: [{{path: "{folder / "lists.jsonl"}"}}], '
        "batch_tokens: 1024, max_length: 128, evaluate_every: 0}"
    )
    align(recipe_of(folder, stage, more=ADAMW), base, folder / "out", quiet=True)
    return folder / "out"


def test_a_taught_model_forks_and_answers_right(taught):
    engine = moesaic.Engine(moesaic.load(taught, threads=1))
    right = 0
    asked = [[0, 1, 2], [3, 2, 0], [1, 3, 2], [2, 0, 3]]
    for numbers in asked:
        prompt = engine.tokenizer.chat([{"role": "user", "content": " ".join(map(str, numbers))}])
        answer = answer_in_branches(engine, prompt, Sampling(max_tokens=60, temperature=0.0))
        right += answer.text == answer_of(numbers)
        assert len(answer.branches) == 4
        tokens = sum(branch.request.written for branch in answer.branches)
        assert tokens > 1.5 * answer.steps  # tokens a step, where a single sequence has one
        # Without branches the same model leaves the details out: it has learned that others write them.
        (plain,) = engine.generate([prompt], max_tokens=60, temperature=0.0)
        assert plain.text.strip() == "\n".join(f"- {n}:" for n in numbers)
    assert right >= 3
