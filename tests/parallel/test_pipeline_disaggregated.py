"""Attention and experts on disjoint groups of ranks, beside one process: loss, every gradient, bytes and a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moesaic.errors import UserError
from moesaic.model.config import Dense, Layer
from moesaic.model.transformer import run_plainly
from moesaic.parallel.pipeline import in_flight
from moesaic.parallel.pipeline.disaggregated import HEAD, AttentionHalf, ExpertHalf
from moesaic.parallel.pipeline.halves import Groups, group_sizes, shares
from moesaic.parallel.pipeline.step import Step
from moesaic.parallel.traces import Recorder, merge
from moesaic.plan.timeline.trace import read_trace
from moesaic.train.balance import Balance
from moesaic.train.objectives.next_token import NextToken
from tests.parallel.ranks import on_ranks
from tests.parallel.test_pipeline import BALANCE, alone, batch_of, config, model_of, same


def every_way(rank: int, world: int, folder: Path) -> None:
    answers = dist.new_group(list(range(world)))
    apart(rank, "glm-4.5", Groups(2, 2), 5, 3, folder)
    apart(rank, "deepseek-v3", Groups(2, 2, None, answers), 4, 1)
    apart(rank, "qwen3-moe", Groups(1, 3), 4, 8)
    apart(rank, "glm-4.5", Groups(3, 1), 4, 2)


def apart(rank: int, name: str, groups: Groups, micro_batches: int, depth: int, folder: Path | None = None) -> None:
    whole = model_of(name)
    parts = [batch_of(seed=number).parts(micro_batches) for number in groups.attention_ranks]
    expected = [alone(whole, some, run_plainly, BALANCE) for some in parts]
    recorder = Recorder(rank, stage=int(rank in groups.expert_ranks))
    among = dist.new_group(list(groups.attention_ranks))
    if rank in groups.expert_ranks:
        half = ExpertHalf(copy.deepcopy(whole), groups, recorder=recorder)
        half.serve()
        for parameter, tensor in half.module.named_parameters():
            other = whole.get_parameter(parameter).grad
            assert tensor.grad is not None and other is not None
            mine = other.split(shares(len(other), groups.experts))[rank - groups.attention]
            same(tensor.grad, mine, parameter)
        half.serve()  # the frozen step below
        held = sum(tensor.numel() for tensor in half.module.parameters())
    else:
        attending = AttentionHalf(copy.deepcopy(whole), groups, depth=depth, recorder=recorder)
        balance = Balance(attending.module, BALANCE)
        found = attending.forward_backward(
            Step(parts[rank], NextToken(), routing=balance.routing, extra=balance.losses, count=balance.count)
        )
        same(found.total, expected[rank].total, "loss")
        assert set(found.parts) == set(expected[rank].parts)
        for part, value in expected[rank].parts.items():
            same(found.parts[part], value, part)
        gradients = {}
        for parameter, tensor in attending.module.named_parameters():
            other = whole.get_parameter(parameter).grad
            assert tensor.grad is not None and other is not None, parameter
            dist.all_reduce(tensor.grad, group=among)
            same(tensor.grad, other, parameter)
            gradients[parameter] = tensor.grad.clone()

        # Every assignment's row leaves once forward, and its gradient once backward; nothing else but heads.
        rows = 2 * int(sum(counts_E.sum() for counts_E in balance.loads.values()))
        heads = groups.experts * (2 * micro_batches * len(balance.loads) + 1)
        expected_bytes = rows * 4 * whole.config.hidden + heads * 8 * (HEAD + attending.widest)
        assert attending.ports.sent_bytes == expected_bytes

        frozen = attending.forward_backward(Step(parts[rank], NextToken(), frozen=True))
        same(frozen.total, expected[rank].total, "frozen loss")
        for parameter, tensor in attending.module.named_parameters():
            assert tensor.grad is not None and torch.equal(tensor.grad, gradients[parameter])
        held = sum(tensor.numel() for tensor in attending.module.parameters()) if rank == 0 else 0
    total = torch.tensor(held)
    dist.all_reduce(total)
    assert total == sum(tensor.numel() for tensor in whole.parameters())  # each parameter on one half
    if folder is not None:
        recorder.write(folder)
        dist.barrier()
        if rank == 0:
            merge(folder, groups.attention + groups.experts, folder / "trace.json")


def test_on_four_processes(tmp_path: Path) -> None:
    on_ranks(4, every_way, tmp_path, tmp_path)
    trace = read_trace(tmp_path / "trace.json")
    assert trace.ranks == [0, 1, 2, 3]
    layers, micro_batches = 4, 5  # with experts: three and a prediction layer
    for rank, passes in ((0, layers + 1), (2, layers)):  # attention works before, between and behind them
        done = sorted((one.start, one.kind, one.micro_batch) for one in trace.records if one.rank == rank)
        computed = [(kind, number) for _, kind, number in done if kind in ("forward", "backward")]
        assert computed.count(("backward", 0)) == passes
        assert computed.count(("forward", 0)) == 2 * passes  # and once frozen
        assert computed[:3] == [("forward", 0), ("forward", 1), ("forward", 0)]
        first = computed.index(("backward", 0))
        last = max(place for place, one in enumerate(computed) if one == ("backward", 0))
        assert ("forward", 2) in computed[first:last]  # in flight both ways, on both halves
        assert {number for _, number in computed} == set(range(micro_batches))


def test_in_flight() -> None:
    """In turn, at most so many at once, and an error of one ends all."""
    said: list[tuple[str, int]] = []

    def work(name: str, pauses: int) -> in_flight.Work:
        def run(pause: Callable[[], None]) -> None:
            for number in range(pauses):
                said.append((name, number))
                pause()
            if name == "bad":
                raise ValueError("no")
            said.append((name, pauses))

        return run

    in_flight.run([work("a", 2), work("b", 1), work("c", 0)], depth=2)
    assert said == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 0), ("a", 2)]
    said.clear()
    in_flight.run([work("a", 2), work("b", 2), work("c", 0)], depth=3, apart=2)
    assert said == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("c", 0), ("a", 2), ("b", 2)]
    said.clear()
    with pytest.raises(ValueError, match="no"):
        in_flight.run([work("a", 9), work("bad", 1), work("c", 0)], depth=2)
    assert said == [("a", 0), ("bad", 0), ("a", 1)]


def test_group_sizes() -> None:
    """The half with more to compute gets more ranks, and each gets one."""
    glm = config("glm-4.5")
    wide = tuple(Layer(replace(layer.ffn, hidden=4000)) for layer in glm.layers[1:])
    assert group_sizes(replace(glm, layers=wide), 8)[1] > group_sizes(glm, 8)[1]
    for ranks in range(2, 9):
        attention, experts = group_sizes(replace(glm, layers=wide), ranks)
        assert attention >= 1 and experts >= 1 and attention + experts == ranks
    with pytest.raises(UserError, match="two at least"):
        group_sizes(glm, 1)
    with pytest.raises(UserError, match="no experts"):
        group_sizes(replace(glm, layers=(Layer(Dense(8)),), mtp=()), 4)
    assert shares(7, 3) == [3, 2, 2]
