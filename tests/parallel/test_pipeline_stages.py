"""Which rank holds which layers, and what cannot be divided."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moesaic.errors import UserError
from moesaic.model.config import Dense, Indexer, Layer
from moesaic.model.transformer import Model
from moesaic.parallel.pipeline.stages import Stages, check_schedule, divide, keep, stage_holds, token_cost
from tests.parallel.test_pipeline import LATENT, config


def sizes(stages: Stages) -> list[int]:
    return [len(layers) for layers in stages.layers]


def test_even_given_and_laid_out() -> None:
    glm = config("glm-4.5", 10)
    assert sizes(divide(glm, 4)) == [3, 3, 2, 2]
    assert sizes(divide(glm, 2, chunks=2)) == [3, 3, 2, 2]
    assert sizes(divide(glm, 4, given=[0, 5, 4, 1])) == [0, 5, 4, 1]
    looped, bent = divide(glm, 2, chunks=2), divide(glm, 2, chunks=2, shape="v")
    assert [looped.of_rank(rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    assert [bent.of_rank(rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert looped.shares_embedding and not bent.shares_embedding  # of a V one rank has both ends
    assert looped.copied(1) == {"embed"} and not looped.copied(0) and not bent.copied(0)


def test_by_cost() -> None:
    """The dearest stage is as cheap as any division into contiguous stages makes it, head and MTP counted."""
    glm = replace(config("glm-4.5", 8), layers=(Layer(Dense(4000)), *config("glm-4.5", 8).layers[1:]))

    def dearest(counts: list[int]) -> int:
        costs = [token_cost(glm, layer) for layer in glm.layers]
        head = glm.vocab * glm.hidden
        edges = [0]
        for count in counts:
            edges.append(edges[-1] + count)
        found = [sum(costs[start:stop]) for start, stop in pairwise(edges)]
        found[-1] += head + sum(token_cost(glm, layer) + 2 * glm.hidden**2 + head for layer in glm.mtp)
        return max(found)

    every = [[a, b, 8 - a - b] for a in range(1, 7) for b in range(1, 8 - a)]
    chosen = sizes(divide(glm, 3, by="cost"))
    assert chosen[0] == 1  # beside the wide layer there is room for nothing
    assert dearest(chosen) == min(map(dearest, every))


@pytest.mark.parametrize("name", ["glm-4.5", "qwen3-moe", "qwen3-moe-tied"])
@pytest.mark.parametrize(("ranks", "chunks", "shape"), [(3, 1, "loop"), (2, 2, "loop"), (2, 2, "v")])
def test_names_say_who_holds_what(name: str, ranks: int, chunks: int, shape: str) -> None:
    whole = Model(config(name, 5))
    stages = divide(whole.config, ranks, chunks=chunks, shape=shape)  # type: ignore[arg-type]
    everywhere: list[str] = []
    for rank in range(ranks):
        with torch.device("meta"):
            model = keep(Model(whole.config), stages, rank)
        held = [parameter for parameter, _ in model.named_parameters()]
        assert held == [one for one, _ in whole.named_parameters() if stage_holds(one, stages, rank)]
        saved = set(model.state_dict())
        assert saved == {one for one in whole.state_dict() if stage_holds(one, stages, rank)}  # buffers too
        assert model.device.type == "meta" and model.to_empty(device="cpu").device.type == "cpu"
        everywhere += [one for one in held if one not in stages.copied(rank)]
    assert sorted(everywhere) == sorted(one for one, _ in whole.named_parameters())  # each counted once


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"ranks": 9}, "8 layers for 9 stages"),
        ({"ranks": 3, "given": [4, 4]}, "2 numbers for 3 ranks"),
        ({"ranks": 2, "given": [4, 5]}, "9 layers in all, but the model has 8"),
        ({"ranks": 3, "given": [4, 0, 4]}, "stage 1 would hold 0 layers"),
        ({"ranks": 2, "shape": "v"}, "a V has two stages per rank"),
    ],
)
def test_impossible_divisions_are_refused(how: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        divide(config("glm-4.5", 8), **how)  # type: ignore[arg-type]


def test_a_selection_of_tokens_does_not_travel() -> None:
    """DSA: a layer that attends to what another selected lies on that one's stage."""
    plain = config("deepseek-v3", 6)
    kinds = ("full", "shared", "shared", "full", "shared", "shared")
    layers = tuple(replace(layer, index=kind) for layer, kind in zip(plain.layers, kinds))
    attention = replace(LATENT, indexer=Indexer(2, 8, 64))
    sparse = replace(plain, attention=attention, layers=layers, mtp=())
    assert sizes(divide(sparse, 2)) == [3, 3]
    assert sizes(divide(sparse, 2, by="cost")) == [3, 3]
    with pytest.raises(UserError, match="layer 2, which attends to what a layer before it selected.*layers 0, 3"):
        divide(sparse, 3)
    with pytest.raises(UserError, match="begin at layer"):
        divide(sparse, 3, by="cost")


@pytest.mark.parametrize(
    ("schedule", "chunks", "micro_batches", "words"),
    [
        ("1f1b", 2, 8, "1f1b has one stage per rank, not 2"),
        ("1f1b", 1, 3, "3 micro-batches for 4 stages"),
        ("interleaved", 1, 8, "needs several stages"),
        ("zero_bubble", 1, 9, "Nearest that works: 8"),
        ("zbv", 2, 8, "laid out as a V"),
        ("zigzag", 1, 8, "Known: gpipe, 1f1b"),
    ],
)
def test_impossible_schedules_are_refused(schedule: str, chunks: int, micro_batches: int, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check_schedule(schedule, divide(config("glm-4.5", 8), 4, chunks=chunks), micro_batches)
