"""Planned memory beside what torch's own trackers count in real steps, alone and divided over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.plan_memory import SERVED, SMALL, Case, Serving, planned_serving, serve, train
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.layout import ParallelLayout
from moesaic.plan.models import catalogue, load_model
from moesaic.plan.own_models import from_config
from moesaic.plan.training.memory import in_flight, training_memory
from moesaic.plan.training.own_memory import OwnTrainer, own_training_memory
from moesaic.plan.training.workload import TrainingWork


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_own_trainer_within_seven_percent(case: Case) -> None:
    planned = own_training_memory(
        from_config(case.config, case.name), OwnTrainer("float32", case.recompute, "cpu"), case.sequences, case.length
    )
    assert planned.total == pytest.approx(train(case, torch.device("cpu")), rel=0.07)


@pytest.mark.parametrize("case", SERVED["cpu"], ids=lambda case: case.name)
def test_own_engine_within_seven_percent(case: Serving) -> None:
    assert planned_serving(case, "cpu").total == pytest.approx(serve(case, torch.device("cpu")), rel=0.07)


@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_over_ranks_as_torch_tracks_it(ranks: int) -> None:
    """FSDP2 over blocks on a fake process group, which communicates nothing and allocates as a real one would."""
    case = SMALL[0]
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model = Model(case.config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.02)
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        count = case.sequences * case.length
        tokens_T = torch.randint(case.config.vocab, (count,))

        def step() -> None:
            hidden_TD = model(tokens_T, Layout([case.length] * case.sequences))
            loss, _ = model.cross_entropy(hidden_TD, tokens_T.roll(-1), torch.full((count,), 1 / count))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
        found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        dist.destroy_process_group()
    trainer = OwnTrainer("float32", False, "cpu", ranks)
    planned = own_training_memory(from_config(case.config, case.name), trainer, case.sequences, case.length)
    by_name = {str(getattr(name, "value", name)): size for name, size in found.items()}
    assert planned.parameters == pytest.approx(by_name["Sharded Param"], rel=1e-3)
    assert planned.optimizer == pytest.approx(by_name["OptState"], rel=1e-3)
    assert planned.buffers == pytest.approx(by_name["Unsharded Param"] + by_name["All Gather"], rel=1e-3)
    assert planned.total == pytest.approx(by_name["Total"], rel=0.07)


@given(
    name=st.sampled_from(sorted(catalogue())),
    sequence=st.sampled_from([512, 1024, 4096]),
    longer=st.sampled_from([2, 4, 8]),
    per_rank=st.integers(1, 16),
    more=st.integers(1, 16),
    recompute=st.sampled_from(["none", "selective", "full"]),
    pp=st.sampled_from([1, 2, 4]),
    interleave=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 2, 3]),
)
def test_more_tokens_never_need_less(
    name: str, sequence: int, longer: int, per_rank: int, more: int, recompute: str, pp: int, interleave: int, zero: int
) -> None:
    model = load_model(name)
    layout = ParallelLayout(dp=8, pp=pp, interleave=interleave if pp > 1 else 1, zero=zero)

    def total(sequence: int, per_rank: int, size: int = 1) -> float:
        work = TrainingWork(8 * per_rank * size, sequence, recompute=recompute)
        return training_memory(model, layout, work, size, per_rank).total

    base = total(sequence, per_rank)
    assert total(sequence * longer, per_rank) > base
    assert total(sequence, per_rank + more) >= base
    assert total(sequence, per_rank, 2) > base


def test_what_is_divided_falls_with_ranks() -> None:
    model = load_model("glm-4.5-air")
    work = TrainingWork(256, 4096)

    def memory(layout: ParallelLayout):
        return training_memory(model, layout, work, 1, 256 // layout.dp)

    plain, experts = memory(ParallelLayout(dp=8)), memory(ParallelLayout(dp=8, ep=8))
    held = sum(layer.ffn.expert_parameters(model.hidden) for layer in (*model.layers, *model.mtp))
    assert plain.parameters - experts.parameters == pytest.approx(2 * held * 7 / 8)
    assert plain.optimizer == pytest.approx(experts.optimizer)  # divided over all copies already
    fsdp = memory(ParallelLayout(dp=64, zero=3))
    whole = model.parameters + sum(model.layer_parameters(layer) for layer in model.mtp)
    assert fsdp.optimizer == pytest.approx(12 * whole / 64, rel=0.001)
    assert fsdp.gradients == pytest.approx(4 * whole / 64, rel=0.001)
    recomputed = training_memory(model, ParallelLayout(dp=8), TrainingWork(256, 4096, recompute="full"), 1, 32)
    assert recomputed.activations < plain.activations / 8


def test_micro_batches_in_flight() -> None:
    """1F1B's first rank holds as many as there are stages, the last one; interleaving (p - 1) / (p v) more."""
    plain = ParallelLayout(pp=8)
    assert [in_flight(plain, rank, 100) for rank in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert in_flight(plain, 0, 3) == 3
    assert in_flight(ParallelLayout(pp=8, interleave=4), 0, 100) == pytest.approx(8 * (1 + 7 / 32), rel=0.02)
