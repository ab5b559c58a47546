"""A forward over cached sequences equals the forward over whole sequences, for any split of the tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moesaic
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from tests.model import oracle

# Grouped-query with windows, with half-turning heads, latent attention, and latent attention with shared selections.
KINDS = ["qwen3-window", "glm4_moe-groups", "deepseek_v3-yarn", "glm_moe_dsa-shared", "mixtral-window-tied"]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> Model:
    path = tmp_path_factory.mktemp(request.param)
    oracle.save(request.param, path)
    return moesaic.load(path)


@st.composite
def schedules(draw) -> tuple[list[int], list[list[int]], int]:
    """Lengths of some sequences, how many tokens of each are given in each step, and the page size."""
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    steps = []
    left = list(lengths)
    while any(left):
        step = [draw(st.integers(0, min(n, 9))) for n in left]
        if not any(step):
            step = [min(1, n) for n in left]
        steps.append(step)
        left = [n - new for n, new in zip(left, step, strict=True)]
    return lengths, steps, draw(st.sampled_from([1, 2, 5, 16]))


@settings(max_examples=25, deadline=None)
@given(schedules(), st.integers(0, 2**31))
def test_any_split_gives_the_same_answer(model, schedule, seed):
    lengths, steps, page_size = schedule
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(3, model.config.vocab, (n,), generator=generator).tolist() for n in lengths]
    whole = model.logits(sequences)

    needed = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    pages = [[order.pop() for _ in range(count)] for count in needed]
    cache = model.new_cache(sum(needed) + 3, page_size)
    for slabs in cache.layers:  # whatever was there before must not matter
        for slab in slabs.values():
            slab.fill_(float("nan"))
    done = [0] * len(lengths)
    pieces: list[list[torch.Tensor]] = [[] for _ in lengths]
    with torch.inference_mode():
        for step in steps:
            new = [tokens[d : d + n] for tokens, d, n in zip(sequences, done, step, strict=True)]
            layout = Layout(step, cached=done, cache=cache, pages=pages)
            flat = torch.tensor([token for tokens in new for token in tokens])
            logits = model.logits_at(model(flat, layout))
            for span in layout.spans:
                pieces[span.number].append(logits[span.start : span.stop])
            done = [d + n for d, n in zip(done, step, strict=True)]
    for piece, expected in zip(pieces, whole, strict=True):
        torch.testing.assert_close(torch.cat(piece), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


def test_no_attention_across_boundaries(model):
    """A sequence's answer does not depend on its neighbours in the batch."""
    mine = [5, 9, 33, 21, 60, 12, 7]
    alone = model.logits([mine])[0]
    crowd = model.logits([[4] * 20, mine, [90, 80]])[1]
    torch.testing.assert_close(crowd, alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


def test_arbitrary_positions(model):
    """Rotary positions are relative, so a sequence moved as a whole gives the same answer, and a torn one another."""
    tokens = torch.tensor([5, 9, 33, 21, 60, 12])
    with torch.inference_mode():
        plain = model(tokens, Layout([6]))
        moved = model(tokens, Layout([6], positions=torch.arange(6) + 20))
        torn = model(tokens, Layout([6], positions=torch.tensor([0, 1, 2, 13, 14, 15])))
    torch.testing.assert_close(moved, plain, rtol=1e-2, atol=1e-3 * float(plain.abs().max()))
    assert (torn - plain).abs().max() > 1e-3 * plain.abs().max()


def test_a_tree_of_guesses_equals_each_of_its_branches(model):
    """Several continuations checked in one forward: each sees its own ancestors only."""
    prompt = [5, 9, 33, 21, 60, 12, 7]
    # node: (token, parent); two branches that fork after the first guess, and one that forks at once
    nodes = [(11, -1), (22, 0), (33, 1), (44, 0), (55, 3), (66, -1)]
    sees = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
    depth = []
    for number, (_, parent) in enumerate(nodes):
        if parent >= 0:
            sees[number] = sees[parent]
        sees[number, number] = True
        depth.append(int(sees[number].sum()) - 1)
    cache = model.new_cache(8, page_size=4)
    pages = [[6, 1, 3, 5]]
    with torch.inference_mode():
        model(torch.tensor(prompt), Layout([len(prompt)], cache=cache, pages=pages))
        positions = torch.tensor(depth) + len(prompt)
        layout = Layout([len(nodes)], cached=[len(prompt)], cache=cache, pages=pages, positions=positions, trees=[sees])
        if getattr(model.config.attention, "indexer", None) is not None:
            # A selection counts all earlier rows, other branches included: such models take lines of guesses only.
            with pytest.raises(AssertionError, match="tree"):
                model(torch.tensor([token for token, _ in nodes]), layout)
            return
        tree = model.logits_at(model(torch.tensor([token for token, _ in nodes]), layout))
    for leaf in (2, 4, 5):
        path = sees[leaf].nonzero().squeeze(1)
        alone = model.logits([prompt + [nodes[i][0] for i in path]])[0][len(prompt) :]
        torch.testing.assert_close(tree[path], alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max()))


def test_pages_side_by_side_are_not_copied(model):
    cache = model.new_cache(8, page_size=4)
    layout = Layout([1], cached=[10], cache=cache, pages=[[2, 3, 4]])
    slab = next(iter(cache.layers[0].values()))
    assert layout.read(slab, layout.spans[0]).data_ptr() == slab[2].data_ptr()
    layout = Layout([1], cached=[10], cache=cache, pages=[[2, 4, 3]])
    assert layout.read(slab, layout.spans[0]).data_ptr() != slab[2].data_ptr()
