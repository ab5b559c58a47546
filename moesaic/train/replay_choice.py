"""How much of what is remembered lies in RAM and is replayed, chosen while a run goes on: the cheapest that does as
well (Miro, Ma et al. 2023).

    train: {memory: {choose: {every: 500, steps: 10, replay: [0, 0.125, 0.5], tolerance: 0.005}}}

Every so many steps the run tries each setting: it takes a few steps with it, is measured, and goes back to where it
was. The measure is the mean of the domains: on new text that comes after these steps, and of each earlier domain on
remembered sequences that are never replayed, since what is replayed from a small memory is soon known by heart. Cost is
the share of replay, and RAM among equals: no clock is read, so a choice does not depend on how busy a machine is, nor
on interruptions.

A trial sees its own few steps only. What a cheap setting forgets adds up until the next choice: tolerances are small.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import torch

from moesaic.data.packing import Batch
from moesaic.data.rehearsal import RehearsalStream, batch_of
from moesaic.kernels.cross_entropy import IGNORED
from moesaic.train import state
from moesaic.train.objectives import layout_of

if TYPE_CHECKING:
    from moesaic.train.run import Run

EACH = 32  # sequences of a domain that are measured


def choose_replay(run: Run) -> None:
    """Before a step, if it is time for it and something can be forgotten."""
    memory = run.settings.memory
    choice = memory.choose if memory is not None else None
    if memory is None or choice is None or not run.step or run.step % choice.every:
        return
    stream, steps = run.data, choice.steps
    assert isinstance(stream, RehearsalStream)
    if run.step + steps >= run.settings.steps or stream.batches(steps + 1) <= steps:
        return
    new = stream.ahead(steps)
    old = stream.memory.never_replayed(EACH, without=set(new.domains))
    if not old:
        return
    measured = [new, *(batch_of(sequences, [domain] * len(sequences)) for domain, sequences in old.items())]
    kept = state.taken(run)
    settings = sorted(product(set(choice.replay), set(choice.ram or [memory.ram])))  # from cheap to dear
    losses, tokens = [], 0
    for replay, ram in settings:
        loss, tried = _tried(run, ram, replay, steps, measured)
        losses.append(loss)
        tokens += tried
        state.put_back(run, *kept)
    best = min(losses)
    taken = next(number for number, loss in enumerate(losses) if loss <= best + choice.tolerance)
    replay, ram = settings[taken]
    assert isinstance(run.data, RehearsalStream)
    run.data.use(ram, replay)
    ends = f"a trial ends at {losses[taken]:.3f}, the best at {best:.3f}"
    run.report.note(
        f"replay {replay:g} with {ram:,} sequences in RAM: {ends}",
        kind="replay",
        replay=replay,
        ram=ram,
        tried=[
            {"replay": replay, "ram": ram, "loss": loss} for (replay, ram), loss in zip(settings, losses, strict=True)
        ],
        tokens=tokens,
    )


def _tried(run: Run, ram: int, replay: float, steps: int, measured: list[Batch]) -> tuple[float, int]:
    """The mean loss after a few steps, and the tokens that they took."""
    assert isinstance(run.data, RehearsalStream)
    run.data.use(ram, replay)
    tokens = 0
    for _ in range(steps):
        batch = run.next_batch()
        run.forward_backward(batch)
        run.optimizer_step()
        run.balance.update()
        tokens += batch.all_tokens
    return sum(_loss(run, batch) for batch in measured) / len(measured), tokens


@torch.no_grad()
def _loss(run: Run, batch: Batch) -> float:
    batch = batch.to(run.device)
    hidden_TD = run.model(batch.tokens_T, layout_of(batch))
    counts_T = (batch.targets_T != IGNORED).float()
    loss, _ = run.model.cross_entropy(hidden_TD, batch.targets_T, counts_T)
    return float(loss) / float(counts_T.sum())
