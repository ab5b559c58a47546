"""An answer that divides says in parallel what it would have said one branch after the other."""

from __future__ import annotations

import pytest

import moesaic
from moesaic.errors import UserError
from moesaic.serve.core.branches import CHILD, FORK, answer_in_branches
from moesaic.serve.core.request import Sampling
from tests.model import oracle
from tests.serve.made import talking_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> moesaic.Engine:
    return moesaic.Engine(moesaic.load(talking_model(tmp_path_factory.mktemp("model"))), page_size=4)


def test_every_branch_is_what_it_would_be_alone(engine):
    fork, child = (engine.tokenizer.fast.token_to_id(mark) for mark in (FORK, CHILD))
    # Nothing taught this model to fork: a bias makes it do so now and then.
    wishes = Sampling(max_tokens=24, temperature=1.0, seed=4, logit_bias={fork: 6.0}, ignore_eos=True)
    prompt = "The number 7 is a number; and as you like it"
    answer = answer_in_branches(engine, prompt, wishes, max_branches=5)
    assert len(answer.branches) == 5
    assert engine.page_pool.in_use == 0
    first = answer.branches[0]
    assert first.request.tokens == [
        *first.request.prompt,
        *engine.generate([first.request.prompt], **wishes.__getstate__())[0].tokens,
    ]
    said = {branch.request.number: branch for branch in answer.branches}
    parents = {id(inner): (branch, place) for branch in said.values() for place, inner in branch.forks.items()}
    for number, branch in enumerate(answer.branches[1:], 1):
        parent, place = parents[id(branch)]
        assert branch.request.prompt == [*parent.request.tokens[: place + 1], child]
        assert parent.request.tokens[place] == fork
        # Its prefix was computed by its parent: whole pages are shared, and the rest of the last one copied.
        assert branch.request.cached >= place - 1
        alone = engine.request(branch.request.prompt, wishes, sibling=number)
        engine.add(alone)
        while alone.finish_reason is None:
            engine.step()
        assert alone.tokens == branch.request.tokens
    tokens = sum(branch.request.written for branch in answer.branches)
    assert tokens == 5 * 24 and answer.steps < tokens / 2


def test_the_text_of_a_branch_stands_where_it_left(engine):
    fork = engine.tokenizer.fast.token_to_id(FORK)
    wishes = Sampling(max_tokens=12, temperature=1.0, seed=4, logit_bias={fork: 6.0}, ignore_eos=True)
    answer = answer_in_branches(engine, "The number", wishes, max_branches=2)
    first, detail = answer.branches
    (place,) = first.forks
    tokens, start = first.request.tokens, len(first.request.prompt)
    before = engine.tokenizer.decode(tokens[start : place + 1])
    after = engine.tokenizer.decode(tokens[place + 1 :])
    assert answer.text == before + detail.text + after
    assert detail.text


def test_a_model_without_marks_is_refused(tmp_path):
    oracle.save("llama-tied", tmp_path)
    with pytest.raises(UserError, match="no tokenizer"):
        answer_in_branches(moesaic.Engine(moesaic.load(tmp_path)), [5, 6])
