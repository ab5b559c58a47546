"""The training loop: whatever is trained passes through here."""

from __future__ import annotations

from moesaic.train.run import Run


def train(run: Run) -> None:
    """Take steps until the budget is spent; every state that matters is in `run`, so any step can be the last."""
    with run:  # a first Ctrl-C ends after the step, saved
        while not run.finished():
            batch = run.next_batch()
            loss = run.learn(batch)  # forward and backward of every part of the batch
            result = run.update()  # clips, skips steps that are not finite, advances the schedule
            loads = run.balance.update()  # aux-loss-free expert balance
            run.tell(batch, loss, result, loads)
            if run.watch.spiked(loss.total, result.skipped):
                run.rewind()  # to the last checkpoint, past the data that broke it
            elif run.due_to_save():
                run.save()  # asynchronous, atomic
