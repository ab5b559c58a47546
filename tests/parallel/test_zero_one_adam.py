"""0/1 Adam between real processes (gloo): the one-bit exchange by itself, then training with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.one_bit import OneBitExchange, ring_bytes
from moesaic.train.optimizers import Optimizer, OptimizerMethod
from moesaic.train.optimizers.adamw import AdamW
from moesaic.train.optimizers.zero_one_adam import ZeroOneAdam, local_steps
from tests.parallel.ranks import on_ranks
from tests.parallel.test_seams import model_of

VOCAB, SEQUENCES, LENGTH = 67, 4, 16
# Exchanges at steps 0 to 19, then at every other one, from 40 on at every fourth.
LOCAL = ZeroOneAdam(lr=0.003, weight_decay=0.01, variance_double_every=2, local_double_every=20, local_limit=4)
# The same sooner: variance at steps 0, 1, 2, 4, 6, 10, exchanges at 0 to 4, 5, 7, 11.
SOON = ZeroOneAdam(lr=0.003, weight_decay=0.01, variance_double_every=2, local_double_every=4, local_limit=4)


def same_everywhere(tensor: Tensor) -> bool:
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(every, tensor.contiguous())
    return all(torch.equal(tensor, other) for other in every)


def weights_of(model: Model) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# -- the exchange


def exchange_alone(rank: int, world: int) -> None:
    exchange = OneBitExchange(dist.group.WORLD)
    sizes = [5000, 1, 300, 7, 0, 256 * world, 40]
    worker = [torch.zeros(size) for size in sizes]
    server = [torch.zeros(exchange.chunk(size)) for size in sizes]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        tensors = [torch.randn(size, generator=generator) for size in sizes]
        tensors[0][1024:1536] = 0  # two whole blocks that no rank uses
        before = exchange.sent_bytes
        means, new_worker, new_server = exchange.mean(tensors, worker, server)
        blocks = [
            exchange.chunk(size) // (256 if size >= 256 * world else max(exchange.chunk(size), 1)) for size in sizes
        ]
        message = sum(exchange.chunk(size) // 8 for size in sizes) + 4 * sum(blocks)
        assert exchange.sent_bytes - before == 2 * (world - 1) * message
        for number, size in enumerate(sizes):
            assert same_everywhere(means[number])
            # Nothing is lost: what was to be sent is what arrived and what is kept to be sent next time.
            wanted, kept = tensors[number] + worker[number], new_worker[number].clone()
            for tensor in (wanted, kept):
                dist.all_reduce(tensor)
                tensor /= world
            wanted += whole(server[number], size)
            torch.testing.assert_close(means[number] + kept + whole(new_server[number], size), wanted)
            assert not torch.equal(means[number], wanted) or size <= 1
        assert not means[0][1024:1536].any() and not new_worker[0][1024:1536].any()
        assert means[0][:256].abs().unique().numel() == 1  # a block is signs and one number
        worker, server = new_worker, new_server


def whole(chunk: Tensor, size: int) -> Tensor:
    parts = [torch.empty_like(chunk) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, chunk.contiguous())
    return torch.cat(parts)[:size]


def mean_over_time(rank: int, world: int) -> None:
    """Error feedback makes up for the compression: the mean over exchanges of one tensor approaches the true mean."""
    exchange = OneBitExchange(dist.group.WORLD)
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    true = tensor.clone()
    dist.all_reduce(true)
    true /= world
    worker, server, total, gaps = torch.zeros(1000), torch.zeros(exchange.chunk(1000)), torch.zeros(1000), []
    for count in range(1, 65):
        (mean,), (worker,), (server,) = exchange.mean([tensor], [worker], [server])
        total += mean
        gaps.append(float((total / count - true).norm() / true.norm()))
    assert gaps[0] > 0.5 and gaps[15] < gaps[0] / 2 and gaps[63] < gaps[0] / 4, gaps


# -- training


def tokens(rank: int, step: int) -> Tensor:
    """Counting by one, two or three from anywhere: something to learn."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    first = torch.randint(0, VOCAB, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    return (first + stride * torch.arange(LENGTH + 1)) % VOCAB


def backward(model: Model, rank: int, step: int, world: int) -> Tensor:
    """Leaves this rank's share of the gradients; returns its share of the loss."""
    tokens_SL = tokens(rank, step)
    count = SEQUENCES * LENGTH
    hidden_TD = model(tokens_SL[:, :-1].reshape(-1), Layout([LENGTH] * SEQUENCES))
    scale_T = torch.full((count,), 1 / (count * world))
    loss, _ = model.cross_entropy(hidden_TD, tokens_SL[:, 1:].reshape(-1), scale_T)
    loss.backward()
    return loss.detach()


def train(model: Model, optimizer: Optimizer, steps: range, rank: int, world: int) -> list[float]:
    """The losses. Gradients are summed here only if the optimizer does not exchange."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = backward(model, rank, step, world)
        if optimizer.exchange is None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step(min(1.0, (step + 1) / 10), clip=1.0)
        dist.all_reduce(loss)
        losses.append(float(loss))
    return losses


def build(method: OptimizerMethod, dtype: torch.dtype = torch.float32) -> tuple[Model, Optimizer]:
    model = model_of().to(dtype)
    group = dist.group.WORLD if method.reduces_gradients else None
    return model, method.build(model.named_parameters(), group)


def as_good_for_a_fifth(rank: int, world: int) -> None:
    steps = 60
    model, adam = build(AdamW(lr=0.003, weight_decay=0.01))
    expected = train(model, adam, range(steps), rank, world)
    assert expected[0] > 4 and sum(expected[-10:]) / 10 < 2.6
    plain = steps * sum(ring_bytes(parameter, world) for parameter in model.parameters())

    model, optimizer = build(LOCAL)
    losses, equal = [], []
    for step in range(steps):
        losses += train(model, optimizer, range(step, step + 1), rank, world)
        equal.append(same_everywhere(weights_of(model)))
    assert sum(losses[-10:]) < 1.05 * sum(expected[-10:]), (losses[-10:], expected[-10:])
    assert optimizer.exchange is not None
    assert optimizer.exchange.sent_bytes <= plain / 5, optimizer.exchange.sent_bytes / plain
    variance = {0, 1, 2, 4, 6, 10, 14, 22, 30, 46}
    apart = [step for step in range(steps) if (step + 1) % local_steps(step, 20, 4) and step not in variance]
    assert [step for step, same in enumerate(equal) if not same] == apart and len(apart) > 15
    errors = [slot.state["worker_error"] for slot in optimizer.slots]
    assert any(error.any() for error in errors) and not all(same_everywhere(error) for error in errors)


def is_adam_at_full_precision(rank: int, world: int) -> None:
    """While every step updates the variance, there is nothing to compress."""
    model, adam = build(AdamW(lr=0.003))
    other, optimizer = build(ZeroOneAdam(lr=0.003, variance_double_every=100))
    # Clipping differs: Adam's is by the norm of the sum, this one's by what the ranks' own norms say.
    for step in range(4):
        for one, its in ((model, adam), (other, optimizer)):
            its.zero_grad()
            backward(one, rank, step, world)
            if its is adam:
                for parameter in one.parameters():
                    dist.all_reduce(parameter.grad)
            result = its.step(1.0, clip=float("inf"))
        assert same_everywhere(result.norm)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(other.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def resumes(rank: int, world: int, dtype: torch.dtype) -> None:
    """From a save in the middle of local steps: on as many ranks to the same bits, on others from the same state."""
    model, optimizer = build(SOON, dtype)
    train(model, optimizer, range(9), rank, world)
    assert not same_everywhere(weights_of(model))
    lost = torch.cat([slot.state["worker_error"].flatten() for slot in optimizer.slots])
    optimizer.bring_together()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    assert all(same_everywhere(tensor) for tensor in (weights | state).values())
    assert not same_everywhere(lost)
    train(model, optimizer, range(9, 12), rank, world)

    again, fresh = build(SOON, dtype)
    train(again, fresh, range(2), rank, world)  # whatever it did before
    again.load_state_dict(weights)
    fresh.load_state_dict(state)
    train(again, fresh, range(9, 12), rank, world)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]) and same_everywhere(tensor), name
    for name, tensor in optimizer.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name

    alone = SOON.build(model_of().to(dtype).named_parameters())
    alone.load_state_dict(state)
    assert torch.equal(alone.state_dict()["embed/momentum"], state["embed/momentum"])
    assert "embed/worker_error" in state and "embed/worker_error" not in alone.state_dict()
    fresh.load_state_dict(alone.state_dict())
    assert not fresh.state_dict()["embed/worker_error"].any()


def keeps_what_was_lost(rank: int, world: int) -> None:
    """Bringing together moves what compression has lost, and loses nothing of it."""
    model, optimizer = build(LOCAL)
    train(model, optimizer, range(6), rank, world)

    def to_make_up() -> Tensor:
        errors = [slot.state["worker_error"].flatten() for slot in optimizer.slots]
        total = torch.cat(errors)
        dist.all_reduce(total)
        server = [whole(slot.state["server_error"], slot.weight.numel()) for slot in optimizer.slots]
        return total / world + torch.cat(server)

    before = to_make_up()
    optimizer.bring_together()
    assert before.abs().max() > 0
    torch.testing.assert_close(to_make_up(), before)


def skips_together(rank: int, world: int, done: int) -> None:
    """A gradient that is not finite on one rank; `done` steps before it, one of each kind of step."""
    model, optimizer = build(SOON)
    train(model, optimizer, range(done), rank, world)
    before = {name: tensor.clone() for name, tensor in (model.state_dict() | all_state(optimizer)).items()}
    optimizer.zero_grad()
    backward(model, rank, done, world)
    if rank == world - 1:
        model.layers[0].ffn.down_EDF.grad[0, 0, 0] = float("nan")  # type: ignore[union-attr, index]
    result = optimizer.step(1.0, clip=1.0)
    assert bool(result.skipped) and int(optimizer.skipped) == 1 and int(optimizer.updates) == done
    for name, tensor in (model.state_dict() | all_state(optimizer)).items():
        assert torch.equal(tensor, before[name]), name
    losses = train(model, optimizer, range(done, done + 4), rank, world)
    assert all(loss < 6 for loss in losses), losses
    optimizer.bring_together()
    assert same_everywhere(weights_of(model))


def anchor_of(optimizer: Optimizer, name: str) -> Tensor:
    return next(slot.state["anchor"] for slot in optimizer.slots if slot.name == name)


def all_state(optimizer: Optimizer) -> dict[str, Tensor]:
    return {f"{slot.name}/{key}": tensor for slot in optimizer.slots for key, tensor in slot.state.items()}


def brings_together(rank: int, world: int) -> None:
    model, optimizer = build(SOON)
    train(model, optimizer, range(9), rank, world)
    weight = model.layers[0].ffn.down_EDF.detach()  # type: ignore[union-attr]
    mean, before = weight.clone(), anchor_of(optimizer, "layers.0.ffn.down_EDF").clone()
    dist.all_reduce(mean)
    mean /= world
    assert not same_everywhere(weight) and same_everywhere(before)
    optimizer.bring_together()
    assert same_everywhere(weights_of(model))
    direction = torch.cosine_similarity((weight - before).view(-1), (mean - before).view(-1), dim=0)
    assert float(direction) > 0.3  # signs alone, and what earlier exchanges left over
    after = {name: tensor.clone() for name, tensor in (model.state_dict() | optimizer.state_dict()).items()}
    optimizer.bring_together()  # nothing is apart any more
    for name, tensor in (model.state_dict() | optimizer.state_dict()).items():
        assert torch.equal(tensor, after[name]), name


def alone_is_without(rank: int, world: int) -> None:
    """A group of one rank, and a parameter that has no gradient on one rank only."""
    groups = [dist.new_group([other]) for other in range(world)]
    results = []
    for group in (None, groups[rank]):
        model = model_of()
        optimizer = ZeroOneAdam(variance_double_every=2).build(model.named_parameters(), group)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, rank, step, 1)
            optimizer.step(1.0, clip=1.0)
        results.append(model.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])

    parameters = {"a.weight": nn.Parameter(torch.ones(3, 3)), "b.weight": nn.Parameter(torch.ones(3, 3))}
    optimizer = ZeroOneAdam(lr=0.1, variance_double_every=1).build(parameters.items(), dist.group.WORLD)
    for _ in range(4):
        parameters["a.weight"].grad = torch.ones(3, 3)
        parameters["b.weight"].grad = torch.ones(3, 3) if rank == 0 else None
        optimizer.step(1.0, clip=float("inf"))
    for parameter in parameters.values():
        assert same_everywhere(parameter.detach()) and float(parameter.detach().max()) < 0.9


def everything(rank: int, world: int) -> None:
    exchange_alone(rank, world)
    mean_over_time(rank, world)
    alone_is_without(rank, world)
    is_adam_at_full_precision(rank, world)
    as_good_for_a_fifth(rank, world)


def recovery(rank: int, world: int) -> None:
    resumes(rank, world, torch.float32)
    resumes(rank, world, torch.bfloat16)
    keeps_what_was_lost(rank, world)
    for done in (2, 3, 8, 10):  # full precision, one bit, alone, full precision after steps alone
        skips_together(rank, world, done)
    brings_together(rank, world)


@pytest.mark.parametrize("world", [2, 4])
def test_exchange_and_training(world: int, tmp_path: Path) -> None:
    on_ranks(world, everything, tmp_path)


def test_resuming_and_skipped_steps(tmp_path: Path) -> None:
    on_ranks(2, recovery, tmp_path)


def test_policy_of_local_steps() -> None:
    assert [local_steps(step, 3, 5) for step in range(13)] == [1, 1, 1, 2, 2, 2, 4, 4, 4, 5, 5, 5, 5]
    assert local_steps(10**9, 1, 1 << 70) == 1 << 62
