"""Which part of a parameter a tensor-parallel rank holds: together the parts are the whole, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moesaic.errors import UserError
from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig
from moesaic.parallel.parts import Part, regions
from moesaic.parallel.tensor.partition import check, part_of, shard_model
from tests.parallel.test_tensor import CONFIGS, DEEPSEEK, GLM, QWEN, model_of


def test_query_key_and_value_heads() -> None:
    """8 query heads and 2 key/value heads of size 6: rows 0-47 are queries, 48-59 keys, 60-71 values."""
    name, shape = "layers.0.attention.qkv.weight", (72, 24)
    assert part_of(name, shape, GLM, 1, 2) == Part(0, ((24, 48), (54, 60), (66, 72)), (1, 1, 1))
    # On four ranks two hold the same key/value head, and other queries that read it.
    assert part_of(name, shape, GLM, 1, 4) == Part(0, ((12, 24), (48, 54), (60, 66)), (1, 2, 2), 1)
    assert part_of(name, shape, GLM, 2, 4) == Part(0, ((24, 36), (54, 60), (66, 72)), (1, 2, 2))
    bias = part_of("mtp.0.block.attention.qkv.bias", (72,), GLM, 2, 4)
    assert bias == part_of(name, shape, GLM, 2, 4) and bias is not None and bias.shape((72,)) == (24,)


def test_other_matrices() -> None:
    assert part_of("layers.0.ffn.gate_up.weight", (40, 24), GLM, 1, 2) == Part(0, ((10, 20), (30, 40)), (1, 1))
    assert part_of("layers.0.ffn.gate_up.bias", (40,), GLM, 1, 2) == Part(0, ((10, 20), (30, 40)), (1, 1))
    assert part_of("layers.1.ffn.shared.down.weight", (24, 8), GLM, 3, 4) == Part(1, ((6, 8),), (1,))
    assert part_of("layers.1.attention.out.weight", (24, 48), GLM, 0, 2) == Part(1, ((0, 24),), (1,))
    assert part_of("layers.1.attention.q_up.weight", (40, 14), DEEPSEEK, 1, 2) == Part(0, ((20, 40),), (1,))
    assert part_of("layers.1.attention.kv_up.weight", (56, 10), DEEPSEEK, 3, 4) == Part(0, ((42, 56),), (1,))
    whole = (
        "embed head norm.weight layers.0.attention_norm.weight layers.0.attention.q_norm.weight mtp.0.join.weight"
        " layers.0.attention.out.bias layers.0.ffn.down.bias layers.1.ffn.router.weight layers.1.ffn.gate_up_EGD"
        " layers.1.ffn.down_EDF layers.0.attention.q_down.weight layers.0.attention.kv_down.bias"
        " layers.0.attention.indexer.queries.weight layers.0.attention.indexer.key_norm.bias layers.1.ffn.residual.bias"
        " value.weight"
    )
    for name in whole.split():
        assert part_of(name, (24, 24), GLM, 1, 2) is None, name
    assert part_of("layers.0.ffn.gate_up.weight", (40, 24), GLM, 0, 1) is None


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_parts_are_the_whole(name: str, ranks: int) -> None:
    whole = dict(model_of(CONFIGS[name]).named_parameters())
    again = {key: torch.full_like(tensor, float("nan")) for key, tensor in whole.items()}
    summed = {key: torch.zeros_like(tensor) for key, tensor in whole.items()}
    squares = dict.fromkeys(whole, torch.zeros(()))
    held = dict.fromkeys(whole, 0)
    for rank in range(ranks):
        model = model_of(CONFIGS[name])
        parts = shard_model(model, rank, ranks)
        assert parts.keys() == whole.keys()
        for key, own in model.named_parameters():
            part = parts[key]
            assert own.requires_grad and tuple(own.shape) == (
                part.shape(whole[key].shape) if part is not None else tuple(whole[key].shape)
            )
            assert torch.equal(own, whole[key] if part is None else part.take(whole[key]))
            for region in regions(whole[key].shape, part):
                again[key][region.whole] = own[region.here].detach()
            half = len(own) // 2  # as FSDP divides it further
            for first, rows in ((0, own[:half].detach()), (half, own[half:].detach())):
                squares[key] = squares[key] + (
                    part.squares(rows, first) if part is not None else rows.square().sum() / ranks
                )
            held[key] += own.numel()
            if part is not None or rank == 0:
                for region in regions(whole[key].shape, part, once=True):
                    summed[key][region.whole] += own[region.here].detach()
    for key, tensor in whole.items():
        assert torch.equal(again[key], tensor), key
        assert torch.equal(summed[key], tensor), key  # nothing is counted twice
        torch.testing.assert_close(squares[key], tensor.detach().square().sum(), msg=key)
        divided = key.endswith(("q_up.weight", "kv_up.weight", "gate_up.weight", "out.weight", "down.weight"))
        if divided and not key.endswith(("q_down.weight", "kv_down.weight")):
            assert held[key] == tensor.numel(), key


def refusal(config: ModelConfig, ranks: int) -> str:
    with pytest.raises(UserError) as found:
        check(config, ranks)
    return str(found.value)


def test_what_ranks_cannot_divide() -> None:
    for config in CONFIGS.values():
        check(config, 1)
        check(config, 2)
    text = refusal(GLM, 3)
    assert text == "parallel.tp=3: 3 ranks do not divide 8 attention heads. Nearest that works: parallel.tp=2."
    assert refusal(GLM, 8) == (
        "parallel.tp=8: 8 ranks do not divide the feed-forward hidden size of layer 0, 20."
        " Nearest that works: parallel.tp=4."
    )
    assert "shared expert's hidden size of layer 1, 8" in refusal(
        replace(GLM, attention=GroupedQuery(16, 16, 6), layers=(Layer(Dense(32)), *GLM.layers[1:])), 16
    )
    six = replace(QWEN, attention=GroupedQuery(12, 6, 6))
    check(six, 12)  # two copies of each key/value head
    text = refusal(six, 4)
    assert "6 key/value heads" in text and "Nearest that works: parallel.tp=3." in text
