"""The tree that a draft process grows: what it computes for every branch, and which rows it holds and gives back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moesaic.model.transformer import Model
from moesaic.serve.core.drafters._draft_candidates import likely_tokens
from moesaic.serve.core.drafters._draft_messages import Close, Extend, Open, Setup
from moesaic.serve.core.drafters._draft_tree import DraftTree
from moesaic.serve.core.drafters._draft_worker import DraftWorker
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.core.sampler import Sampler
from tests.serve.tiny import VOCABULARY, tiny_latent_model, tiny_model

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def worker_for(model: Model, rows: int = 400, width: int = 3, nodes: int = 20) -> DraftWorker:
    setup = Setup("", torch.float32, "cpu", 1, rows, None, VOCABULARY, frozenset(), width, nodes)
    return DraftWorker(model, setup)


def settle(worker: DraftWorker) -> list[list[int]]:
    """Step until nothing is left to compute; how many nodes the trees have."""
    while worker.step()[0]:
        pass
    return [list(drafted.tree.nodes) for drafted in worker.requests.values()]


def check_trees(worker: DraftWorker, model: Model) -> int:
    """Every node's children are what a forward of the whole path says follows; how many were looked at."""
    seen = 0
    for drafted in worker.requests.values():
        tree, shadow = drafted.tree, drafted.shadow
        for number, node in tree.nodes.items():
            if not node.children:
                continue
            path = [tree.nodes[one].token for one in tree.path(number)]
            logits_V = model.logits([[*shadow.tokens, *path]])[0][-1]
            expected = likely_tokens(logits_V[None], [(shadow, path)], frozenset(), worker.setup.width)[0]
            assert list(node.children) == [token for token, _ in expected]
            seen += 1
    return seen


def rows_held(worker: DraftWorker) -> set[int]:
    held: list[int] = []
    for drafted in worker.requests.values():
        held += drafted.shadow.pages[len(drafted.shadow.nodes) :]
        held += [node.row for node in drafted.tree.nodes.values() if node.row is not None]
    shared = {node.page for drafted in worker.requests.values() for node in drafted.shadow.nodes}
    assert len(held) == len(set(held)) and not shared & set(held)  # no row is two tokens'
    return shared | set(held)


@pytest.mark.parametrize("latent", [False, True])
def test_branches_are_computed_like_whole_texts(latent: bool, model: Model):
    """After accepted paths, misses, and both at once; with two requests, one of which draws."""
    model = tiny_latent_model() if latent else model
    worker, choose = worker_for(model), random.Random(3)
    worker.take(Open(1, [5, 6, 7, 8], [5, 6, 7, 8, 9], GREEDY, 0, ""))
    worker.take(Open(2, [5, 6, 7], [5, 6, 7], Sampling(temperature=0.8, top_p=0.9), 11, ""))
    for turn in range(6):
        settle(worker)
        assert check_trees(worker, model) > 4
        assert rows_held(worker) == set(range(400)) - set(worker.page_pool.free) - idle_rows(worker)
        for number, drafted in list(worker.requests.items()):
            tree, at, tokens = drafted.tree, drafted.tree.root, []
            while turn % 3 and (children := tree.nodes[at].children) and len(tokens) < 4:  # down some path
                tokens.append(choose.choice(list(children)))
                at = children[tokens[-1]]
            unknown = [token for token in range(VOCABULARY) if token not in tree.nodes[at].children]
            tokens += [choose.choice(unknown)] if turn != 4 else []  # the model's own, which no draft had
            computed = sum(tree.nodes[node].row is not None for node in tree.path(at))
            before = drafted.shadow.computed
            worker.take(Extend(number, tokens))
            assert drafted.shadow.computed == before + computed  # what was computed is not computed again
    worker.take(Close(1))
    worker.take(Close(2))
    assert worker.page_pool.in_use == 0


def idle_rows(worker: DraftWorker) -> set[int]:
    """Rows of prefixes that nobody uses now."""
    waiting, found = [children for children in worker.page_pool.roots.values()], set()
    while waiting:
        for node in waiting.pop().values():
            waiting.append(node.children)
            if not node.users:
                found.add(node.page)
    return found


def test_it_learns_how_often_it_is_right(model: Model):
    """An unsure draft model that is always right: its trees become deeper, and no wider."""
    worker = worker_for(model, rows=2000, nodes=12)
    flat = Sampling(temperature=0.0, logit_bias={}, repetition_penalty=1.01)
    with torch.no_grad():
        before = model.norm.weight.clone()
        model.norm.weight *= 0.1  # logits a tenth, and the same order
    try:
        worker.take(Open(1, [5, 6, 7], [5, 6, 7], flat, 0, ""))
        settle(worker)
        depths = []
        for _ in range(40):
            tree = worker.requests[1].tree
            depths.append(max(len(tree.path(number)) for number in tree.nodes))
            worker.take(Extend(1, [next(iter(tree.nodes[tree.root].children))]))  # its first choice
            settle(worker)
    finally:
        with torch.no_grad():
            model.norm.weight.copy_(before)
    assert depths[0] <= 3 and depths[-1] >= 8


def test_without_room_the_oldest_gives_way(model: Model):
    worker = worker_for(model, rows=40, nodes=8)
    for number in range(6):
        prompt = [10 + number] * 9
        worker.take(Open(number, prompt, prompt, GREEDY, 0, ""))
        settle(worker)
        assert len(rows_held(worker)) <= 40
    newest = worker.requests[5]
    assert newest.tree.nodes[newest.tree.root].children
    assert not worker.requests[0].shadow.pages
    worker.take(Extend(0, [3]))  # it comes back
    settle(worker)
    assert check_trees(worker, model) > 4
    for number in range(6):
        worker.take(Close(number))
    assert worker.page_pool.in_use == 0


def test_a_text_longer_than_the_draft_model_reads_is_left_alone(model: Model):
    worker = worker_for(model)
    worker.take(Open(1, [5] * 256, [5] * 256, GREEDY, 0, ""))
    worker.take(Open(2, [6] * 250, [6] * 250, GREEDY, 0, ""))
    settle(worker)
    assert not worker.requests[1].shadow.pages
    tree = worker.requests[2].tree
    assert max(len(tree.path(number)) for number in tree.nodes) <= 6
    assert worker.step() == (False, [])  # and it sleeps


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.floats(0.01, 1.0)), max_size=40), st.data())
def test_the_root_moves_down(entries: list[tuple[int, int, float]], data: st.DataObject):
    tree, parents = DraftTree(0, 5), {0: -1}
    for number, (parent, token, confidence) in enumerate(entries, 1):
        parent = min(parent, number - 1)
        if parent in tree.nodes and token not in tree.nodes[parent].children:
            tree.add(number, parent, token, confidence)
            parents[number] = parent
    draft = tree.draft(0, 10)
    chances: list[float] = []
    for node, parent in enumerate(draft.parents):
        assert parent < node
        chances.append(draft.confidence[node] * (chances[parent] if parent >= 0 else 1.0))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(chances))  # best first
    root = data.draw(st.sampled_from(sorted(tree.nodes)))
    below = {number for number in tree.nodes if number == root or root in above(parents, number)}
    line = [tree.nodes[number].token for number in tree.path(root)]
    assert tree.walk(line) == root
    dropped = tree.reroot(root, 5 + len(line))
    assert set(tree.nodes) == below and len(dropped) == len(parents) - len(below)
    assert tree.walk([]) == root and tree.chance(root) == 1.0


def above(parents: dict[int, int], number: int) -> set[int]:
    found = set()
    while (number := parents[number]) >= 0:
        found.add(number)
    return found


def test_the_token_that_is_drawn_comes_first_or_near(model: Model):
    """Over many seeds: the draw itself is always a candidate, and confidence tells how often a noisy model agrees."""
    generator = torch.Generator().manual_seed(1)
    agreed: list[tuple[float, bool]] = []
    for seed in range(300):
        logits_1V = 2 * torch.randn(1, VOCABULARY, generator=generator)
        noisy_1V = logits_1V + 0.3 * torch.randn(1, VOCABULARY, generator=generator)
        request = Request([1, 2], Sampling(temperature=1.0, top_k=20), seed=seed)
        likely = likely_tokens(logits_1V, [(request, [])], frozenset(), 4)[0]
        assert Sampler(logits_1V).sample(0, request, set()).token in [token for token, _ in likely]
        chosen = Sampler(noisy_1V).sample(0, request, set()).token
        agreed += [(confidence, token == chosen) for token, confidence in likely]
    sure = [one for confidence, one in agreed if confidence > 0.7]
    unsure = [one for confidence, one in agreed if confidence < 0.2]
    assert len(sure) > 50 < len(unsure)
    assert sum(sure) / len(sure) > 0.5 > 0.3 > sum(unsure) / len(unsure)
    assert request.tokens == [1, 2]


def test_a_draft_holds_the_likeliest_nodes():
    """Over all branches: a sure child of a sure node goes before an unsure sibling."""
    tree = DraftTree(0, 5)
    for number, (parent, token, confidence) in enumerate([(0, 11, 0.2), (0, 12, 0.7), (2, 13, 0.9), (2, 14, 0.1)], 1):
        tree.add(number, parent, token, confidence)
    draft = tree.draft(0, 3)
    assert draft.tokens == [12, 13, 11] and draft.parents == [-1, 0, -1]
    assert tree.draft(0, 9).tokens == [12, 13, 11, 14]
