"""Who is named when ranks wait for each other, what copies in memory bring back, and who is called slow."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from moesaic.errors import UserError
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.staying_up.activity import Activity
from moesaic.parallel.staying_up.flows import Flows
from moesaic.parallel.staying_up.meeting import meet
from moesaic.parallel.staying_up.nonfinite import explain
from moesaic.parallel.staying_up.redundancy import Redundancy
from moesaic.parallel.staying_up.stragglers import own_seconds, stragglers
from moesaic.parallel.staying_up.upkeep import is_collective_failure
from moesaic.parallel.staying_up.verdict import Word, stuck
from moesaic.parallel.staying_up.watch import EXIT, Watch
from tests.parallel.ranks import on_ranks


def word(rank: int, stalled: float, operation: str = "backward", **facts: object) -> Word:
    return Word(rank, 7, operation, stalled, **facts)  # type: ignore[arg-type]


def test_nobody_is_named_before_the_bound() -> None:
    assert stuck([word(0, 9.9), word(1, 9.9, silent=9.9)], bound=10, silence=2) is None


def test_a_silent_rank_is_named_before_those_that_wait_for_it() -> None:
    found = stuck([word(0, 11, begun={"all": 5}), word(1, 10.5, silent=10.5, begun={"all": 4})], bound=10, silence=2)
    assert found is not None and found.rank == 1 and found.silent
    assert "rank 1 has said nothing for 10.5 s; it was in step 7, backward" in found.text


def test_the_rank_that_has_not_arrived_is_named_through_a_chain_of_groups() -> None:
    # Rank 1 computes for ever; 0 waits for it among the experts' ranks, and 2 and 3 for 0 and 1 in the data group.
    words = [
        word(0, 12, begun={"ep 0": 8, "dp 0": 3}),
        word(1, 13, "forward", begun={"ep 0": 7, "dp 1": 3}),
        word(2, 11, begun={"ep 2": 8, "dp 0": 4}),
        word(3, 11, begun={"ep 2": 8, "dp 1": 4}),
    ]
    found = stuck(words, bound=10, silence=2)
    assert found is not None and (found.rank, found.operation, found.silent) == (1, "forward", False)
    assert "rank 1 has not arrived: step 7, forward, for 13.0 s" in found.text
    assert "rank 3 waits in collective 4 of group dp 1" in found.text


def test_one_that_says_it_takes_its_time_is_waited_for_unless_it_falls_silent() -> None:
    saving = word(0, 50, "save", patient=True, begun={"all": 1})
    waiting = word(1, 40, "forward", begun={"all": 2})
    assert stuck([saving, waiting], bound=10, silence=2) is None
    gone = word(0, 50, "save", patient=True, silent=12, begun={"all": 1})
    found = stuck([gone, waiting], bound=10, silence=2)
    assert found is not None and found.rank == 0


def test_a_watch_names_a_rank_that_fell_silent_once(tmp_path: Path) -> None:
    store, ended = dist.HashStore(), threading.Event()
    quiet = Watch(Activity(), store, 1, 2, lambda: {"all": 3}, 0.4)
    quiet.activity.enter("dispatch")
    quiet.activity.step = 4
    quiet.post()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        watch.stop()
        ended.set()

    watch = Watch(Activity(), store, 0, 2, lambda: {"all": 4}, 0.4, tmp_path / "events.jsonl", end=end)
    watch.activity.enter("backward")
    watch.start()
    assert ended.wait(60)
    assert codes == [EXIT]
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["kind"], event["rank"], event["step"], event["operation"]) == ("stuck", 1, 4, "dispatch")


def test_ranks_of_a_new_attempt_meet_in_the_store_of_the_old() -> None:
    store = dist.HashStore()
    for attempt in range(2):
        met: dict[int, dist.Store] = {}

        def join(rank: int, met: dict[int, dist.Store] = met) -> None:
            met[rank] = meet(store, rank, 3, 60)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in (1, 2, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not met[1].check(["address"]), "what the attempt before has left is seen"
        met[0].set("address", str(attempt))
        assert [met[rank].get("address") for rank in range(3)] == [str(attempt).encode()] * 3


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(UserError, match="rank 1: did not come within 0.05 s"):
        meet(dist.HashStore(), 0, 2, 0.05)


def test_failures_of_collectives_are_told_from_other_errors() -> None:
    assert is_collective_failure(RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer"))
    assert is_collective_failure(dist.DistBackendError("NCCL error"))
    assert not is_collective_failure(ValueError("connection"))
    assert not is_collective_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def state(rank: int, step: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    made = {"a": torch.randn(3 + rank, 5, generator=generator), "b": torch.tensor(step), "empty": torch.zeros(0, 4)}
    return {"weights": made, "optimizer": {"a/moment": torch.randn(7, generator=generator).bfloat16()}}


def copies(rank: int, world: int, folder: Path) -> None:
    mesh = ParallelMesh(ParallelLayout(dp=world), torch.device("cpu"))
    machine = folder / f"machine-{rank}"  # each rank on a machine of its own
    memory = Redundancy(mesh, machine, "run")
    for step in (1, 2, 3):
        size = memory.keep(step, {"step": step, "rank": rank}, state(rank, step))
    memory.wait()
    mesh.barrier()
    body = sum(tensor.nbytes for group in state(rank, 3).values() for tensor in group.values())
    assert size >= body and memory.sent_bytes >= 3 * body

    def check(step: int) -> None:
        again = Redundancy(mesh, machine, "run")
        assert again.newest() == step
        numbers, groups = again.read(step)
        assert numbers == {"step": step, "rank": rank}
        for group, tensors in state(rank, step).items():
            for name, tensor in tensors.items():
                assert torch.equal(groups[group][name], tensor) and groups[group][name].dtype == tensor.dtype
        mesh.barrier()

    check(3)
    if rank == 1:  # its machine is lost, with its own copies and those of rank 0
        memory.forget()
        assert not [*machine.rglob("owner-*")]
    mesh.barrier()
    check(3)
    if rank == 0:  # killed while it wrote: what is half written does not count
        memory.place(0, 3).void()
        for other in folder.glob("machine-*/holder-*/owner-0.1.json"):
            other.unlink()
    mesh.barrier()
    check(2)  # the step before, of which all are still there
    memory.close()
    assert not machine.exists()
    assert Redundancy(mesh, machine, "another run").newest() == 0


def test_lost_state_comes_back_from_the_neighbour(tmp_path: Path) -> None:
    on_ranks(3, copies, tmp_path, tmp_path)


def flows(rank: int, world: int) -> None:
    noted: list[tuple[str, str, int]] = []
    times = iter(range(1000))
    mode = Flows(lambda: float(next(times)), lambda name, group, size, start, end: noted.append((name, group, size)))
    x = torch.ones(4, requires_grad=True)
    with mode:
        dist.all_reduce(torch.ones(3))
        dist.all_gather([torch.empty(2) for _ in range(world)], torch.ones(2))
        functional.all_to_all_single_autograd(x, [2] * world, [2] * world, list(range(world))).sum().backward()
        dist.barrier()
    sizes = [("all_reduce", 12), ("all_gather", 8), ("all_to_all", 16), ("all_to_all", 16)]
    assert [(name, size) for name, _, size in noted[:4]] == sizes  # the gradient travels too
    assert noted[4][0] == "barrier" and {group for _, group, _ in noted} == {"all (0, 1)"}


def test_every_collective_is_noted(tmp_path: Path) -> None:
    on_ranks(2, flows, tmp_path)


def event(kind: str, start: float, seconds: float) -> dict:
    return {"cat": kind, "ts": start * 1e6, "dur": seconds * 1e6}


def test_own_time_is_without_collectives() -> None:
    events = [event("flow", 0.5, 1.0), event("forward", 0, 3), event("backward", 3, 2), event("flow", 4, 0.5)]
    assert own_seconds([*events, event("flow", 9, 1), event("pipeline", 0, 5)]) == {"forward": 2.0, "backward": 1.5}


def test_the_slow_rank_is_named_with_what_it_costs() -> None:
    seconds = [{"forward": 10.0, "data": 1.0}, {"forward": 16.0, "data": 1.0}, {"forward": 10.2, "data": 1.0}]
    (found,) = stragglers(seconds, [0, 0, 0], steps=10, step_seconds=2.0)
    assert (found.rank, found.operation) == (1, "forward")
    assert found.seconds == pytest.approx(0.58) and found.share == pytest.approx(0.29)
    assert stragglers(seconds, [0, 1, 0], steps=10, step_seconds=2.0) == []  # another stage has other work


def test_what_is_not_finite_is_named() -> None:
    fine = {"loss": True, "weights": None, "parameter": None, "count": 0}
    text, facts = explain([fine, fine | {"loss": False, "parameter": "head.weight", "count": 9}])
    assert facts == {"rank": 1, "parameter": "head.weight"}
    assert "the loss of rank 1 is not finite" in text and "first in head.weight (rank 1, 9 parameters there)" in text
    text, facts = explain([fine, fine | {"weights": "layers.2.norm.weight", "parameter": "embed", "count": 3}])
    assert facts == {"rank": 1, "parameter": "layers.2.norm.weight"} and "weights of layers.2.norm.weight" in text
