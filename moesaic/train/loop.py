"""The training loop: pretraining and every alignment stage run it."""

from __future__ import annotations

from moesaic.train.replay_choice import choose_replay
from moesaic.train.run import Run


def train(run: Run) -> None:
    """Take steps until the budget is spent; every state that matters is in `run`, so any step can be the last."""
    with run:  # the first Ctrl-C stops after the current step, with a checkpoint
        while not run.finished():
            choose_replay(run)  # of what is remembered, where asked for
            batch = run.next_batch()
            loss = run.forward_backward(batch)  # over all micro-batches
            result = run.optimizer_step()  # clips, skips non-finite gradients, advances the schedule
            loads = run.balance.update()  # aux-loss-free expert balance
            run.log_step(batch, loss, result, loads)
            if run.spike_detector.spiked(loss.total, result.skipped):
                run.rewind()  # to the last checkpoint, past the data that caused it
            elif run.due_to_save():
                run.save()  # asynchronous, atomic
            run.keep_copy()  # in the neighbour's memory, if asked for
