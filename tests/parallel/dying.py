"""`moesaic` on one rank of many that gets a signal at a moment that a test chooses: run by torchrun in its place.

    torchrun ... tests/parallel/dying.py RANK SIGNAL OPERATION STEP train RECIPE ...

It sends the signal to itself when it enters the operation in that step, in the first attempt only. `writing` is within
a checkpoint, where the boxes of a rank are written. Nothing in the product knows of it.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from moesaic.cli import main
from moesaic.parallel.staying_up.activity import Activity
from moesaic.train.sharded_checkpoints import ShardedCheckpoints


def arm(rank: int, number: int, operation: str, step: int) -> None:
    if int(os.environ["RANK"]) != rank or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return

    def strike() -> None:
        print(f"rank {rank} gets signal {number} in {operation} of step {step}, process {os.getpid()}", flush=True)
        os.kill(os.getpid(), number)

    enter, fill = Activity.enter, ShardedCheckpoints._fill

    def entered(self: Activity, name: str, patient: bool = False) -> None:
        enter(self, name, patient)
        if name == operation and self.step == step:
            strike()

    def filled(self: ShardedCheckpoints, fresh: Any, snapshot: Any) -> None:
        if operation == "writing" and snapshot.step == step:
            strike()
        fill(self, fresh, snapshot)

    Activity.enter = entered  # type: ignore[method-assign]
    ShardedCheckpoints._fill = filled  # type: ignore[method-assign]


if __name__ == "__main__":
    rank, kind, operation, step = sys.argv[1:5]
    arm(int(rank), getattr(signal, f"SIG{kind}"), operation, int(step))
    sys.argv[1:] = sys.argv[5:]
    sys.exit(main())
