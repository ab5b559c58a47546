"""One attention rank and its expert ranks: the bits of one process, the bytes of the formula, and real overlap."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moesaic
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.serve.group.apart import ping_pong
from moesaic.serve.group.apart.away import AwayKernels, ExpertsAway, MicroBatch, plans_for
from moesaic.serve.group.apart.expert_rank import ExpertRank, end
from moesaic.serve.group.apart.wires import ASSIGNMENT_BYTES, HEAD_BYTES, Wire
from moesaic.serve.group.experts.slots import ExpertReader, LayerExperts
from moesaic.serve.group.links import Traffic
from tests.parallel.ranks import on_ranks, start
from tests.serve.group.models_apart import VOCABULARY, save_mixture

STALL = 20.0
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("apart")
    return {family: save_mixture(folder / family, family) for family in ("qwen3_moe", "deepseek_v3")}


class Attention:
    """The attention rank of a test: a whole model to compare with, and one whose experts are elsewhere."""

    def __init__(self, directory: Path, store: dist.Store, experts: int, slots: int = 0) -> None:
        self.model = moesaic.load(directory, threads=1)
        reader = ExpertReader(directory, self.model.dtype, CPU)
        counts = {layer: reader.shape(layer).count for layer in reader.layers}
        self.traffic = Traffic()
        wires = {rank: Wire(store, 0, rank, 0, STALL, self.traffic) for rank in range(experts)}
        self.away = ExpertsAway(
            wires, plans_for(counts, experts, dict.fromkeys(counts, slots or -(-8 // experts))), counts
        )
        self.ops: Any = AwayKernels(self.model.ops, self.away)

    def run(self, lengths: list[int], cut: int = 2, cached: int = 0) -> tuple[torch.Tensor, Routing]:
        x_TD, context = begun(self.model, lengths, cached)

        def ops_of(number: int, layout: Layout) -> Any:
            return self.ops.of(MicroBatch(number, 1, turn=sum(lengths)))

        parts = ping_pong.cuts(lengths, [not ping_pong.cuts_sequences(self.model)] * len(lengths), cut)
        out_TD = ping_pong.run(self.model, x_TD, context, ops_of, parts, self.away.watch)
        assert context.routing is not None
        return self.model.finish(out_TD, context), context.routing

    def alone(self, lengths: list[int], cached: int = 0) -> tuple[torch.Tensor, Routing]:
        x_TD, context = begun(self.model, lengths, cached)
        assert context.routing is not None
        return self.model.finish(self.model.run_layers(x_TD, context), context), context.routing


def begun(model: Model, lengths: list[int], cached: int) -> Any:
    cache = model.new_cache(pages=32, page_size=4)
    for layer in cache.layers:
        for tensor in layer.values():
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)))
    pages, start = [], 0
    for length in lengths:
        need = -(-(length + cached) // 4)
        pages.append(list(range(start, start + need)))
        start += need
    layout = Layout(lengths, cached=[cached] * len(lengths), cache=cache, pages=pages)
    tokens_T = torch.randint(VOCABULARY, (sum(lengths),), generator=torch.Generator().manual_seed(sum(lengths)))
    return model.begin(tokens_T, layout, Routing())


def expert_rank(directory: Path, store: dist.Store, rank: int, experts: int, slots: int = 0) -> ExpertRank:
    torch.set_num_threads(1)
    model = moesaic.load(directory, threads=1)
    reader = ExpertReader(directory, model.dtype, CPU)
    counts = {layer: reader.shape(layer).count for layer in reader.layers}
    plans = plans_for(counts, experts, dict.fromkeys(counts, slots or -(-8 // experts)))
    wires = {0: Wire(store, 0, rank, 1, STALL, Traffic())}
    held = {layer: LayerExperts(reader, layer, plan.slots[rank]) for layer, plan in plans.items()}
    return ExpertRank(reader, held, wires, model.ops)


def store_of(folder: Path, world: int) -> dist.Store:
    return dist.FileStore(str(folder / "wires"), world)


# Bits


def same_bits(rank: int, world: int, directories: dict[str, Path], folder: Path) -> None:
    for number, (name, directory) in enumerate(directories.items()):
        store = dist.PrefixStore(name, store_of(folder, world))
        if rank:
            expert_rank(directory, store, rank - 1, world - 1, slots=5 * number).serve()
            continue
        with torch.inference_mode():
            attention = Attention(directory, store, world - 1, slots=5 * number)
            for lengths, cached in (([1], 3), ([7, 1, 1, 12], 0), ([23], 6), ([1, 1], 9), ([4, 4], 0)):
                expected, routes = attention.alone(lengths, cached)
                for cut in (1, 2, 3):
                    found, chosen = attention.run(lengths, cut, cached)
                    assert torch.equal(found, expected), f"{name} {lengths} in {cut}"
                    assert chosen.choices.keys() == routes.choices.keys()
                    for layer, chosen_TK in chosen.choices.items():
                        assert torch.equal(chosen_TK, routes.choices[layer])
            end(attention.away.wires)


def test_rows_come_back_with_the_bits_of_one_process(directories: dict[str, Path], tmp_path: Path) -> None:
    """On three expert ranks, without and with copies of experts, in one to three micro-batches."""
    on_ranks(4, same_bits, tmp_path, directories, tmp_path)


# Bytes


def bytes_on_wires(rank: int, world: int, directory: Path, folder: Path) -> None:
    store = store_of(folder, world)
    if rank:
        expert_rank(directory, store, rank - 1, world - 1).serve()
        return
    with torch.inference_mode():
        attention = Attention(directory, store, world - 1)
        _, routing = attention.run([9, 5], cut=2)
        pieces = [slice(0, 7), slice(7, 14)]
        for at, wire in attention.away.wires.items():
            there = 0
            for layer, experts_TK in routing.choices.items():
                held = torch.tensor(attention.away.plans[layer].slots[at])
                for piece in pieces:
                    asked_TK = torch.isin(experts_TK[piece], held)
                    if asked_TK.any():
                        rows, assignments = int(asked_TK.any(1).sum()), int(asked_TK.sum())
                        there += HEAD_BYTES + rows * 64 * 4 + assignments * ASSIGNMENT_BYTES
            assert attention.traffic.bytes[wire.name] == there > 0
        end(attention.away.wires)


def test_bytes_are_those_of_the_formula(directories: dict[str, Path], tmp_path: Path) -> None:
    """A head, each needed row once, and expert, row and weight of each assignment."""
    on_ranks(3, bytes_on_wires, tmp_path, directories["qwen3_moe"], tmp_path)


# Overlap


def meet(store: dist.Store, name: str, own: int) -> None:
    """Return when the other one is here, too."""
    store.set(f"{name}/{own}", "here")
    store.wait([f"{name}/{1 - own}"], timedelta(seconds=STALL))


def overlapping(rank: int, world: int, directory: Path, folder: Path) -> None:
    """Each side waits in the middle of its work for the other to be in the middle of its own."""
    store, meetings = store_of(folder, world), dist.FileStore(str(folder / "meetings"), world)
    if rank:
        experts = expert_rank(directory, store, 0, 1)

        def at_experts(kind: str, layer: int, micro: int, done: bool) -> None:
            if not done and micro == 0:  # while attention has the other half of this layer
                meet(meetings, f"{layer}/0", 0)
            if not done and micro == 1 and layer < 2:  # while attention has the first half of the next
                meet(meetings, f"{layer}/1", 0)

        experts.watch = at_experts
        experts.serve()
        return
    events = []
    with torch.inference_mode():
        attention = Attention(directory, store, 1)

        def at_attention(kind: str, layer: int, micro: int, done: bool) -> None:
            events.append((kind, layer, micro, done))
            if not done and micro == 1:
                meet(meetings, f"{layer}/0", 1)
            if not done and micro == 0 and layer > 0:
                meet(meetings, f"{layer - 1}/1", 1)

        attention.away.watch = at_attention
        found, _ = attention.run([6, 6])
        attention.away.watch = None
        assert torch.equal(found, attention.alone([6, 6])[0])
        end(attention.away.wires)
    assert [event[1:3] for event in events if not event[3]] == [
        (layer, micro) for layer in range(3) for micro in (0, 1)
    ]


def test_attention_works_on_one_half_while_the_experts_have_the_other(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    """In every layer, both ways: without overlap the two would wait for each other for ever."""
    on_ranks(2, overlapping, tmp_path, directories["qwen3_moe"], tmp_path)


# A rank that is lost


def killed(rank: int, world: int, directory: Path, folder: Path, slots: int) -> None:
    store = store_of(folder, world)
    if rank:
        experts = expert_rank(directory, store, rank - 1, world - 1, slots)
        if rank == 2:

            def die(kind: str, layer: int, micro: int, done: bool) -> None:
                if layer == 1 and micro == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            experts.watch = die
        experts.serve()
        return
    with torch.inference_mode():
        attention = Attention(directory, store, world - 1, slots)
        expected, _ = attention.alone([9, 5])
        found, _ = attention.run([9, 5])
        assert torch.equal(found, expected) and attention.away.lost == [1]
        found, _ = attention.run([9, 5])
        assert torch.equal(found, expected)
        stats = attention.away.stats()
        assert sorted(stats) == [0, 2]
        read = sum(one.read for one in stats.values())
        held = sum(len(plan.slots[at]) for plan in attention.away.plans.values() for at in (0, 2))
        if slots:
            assert read == held == 3 * 16, "copies need not be read again"
        else:
            assert 3 * 5 < read <= held == 3 * 8, "only what the lost rank held, when it is first wanted"
        end(attention.away.wires)
    (folder / "done").write_text("yes")


@pytest.mark.parametrize("slots", [0, 8], ids=["read from the directory", "from copies"])
def test_a_killed_expert_rank_costs_no_bit(directories: dict[str, Path], tmp_path: Path, slots: int) -> None:
    """SIGKILL in the middle of a layer, one micro-batch computed and one not."""
    processes = start(_alone, (4, str(tmp_path / "store"), directories["qwen3_moe"], tmp_path, slots), 4, join=False)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(process.is_alive() for process in processes.processes):
        time.sleep(0.05)
    codes = [process.exitcode for process in processes.processes]
    assert codes == [0, 0, -signal.SIGKILL, 0] and (tmp_path / "done").exists()


def _alone(rank: int, world: int, store: str, directory: Path, folder: Path, slots: int) -> None:
    torch.set_num_threads(1)
    killed(rank, world, directory, folder, slots)
