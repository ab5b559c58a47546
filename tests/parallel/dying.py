"""`moesaic` on many ranks, one of which comes to harm at a moment that a test chooses: run by torchrun in its place.

    main("1:KILL:backward:5,0:STOP:forward:7", ["train", "RECIPE", ...])

In the first attempt rank 1 kills itself when it enters the backward pass of step 5, in the second rank 0 stops itself,
and later ones are left alone; + stands between two faults of one attempt. `writing` is within a checkpoint, where the
boxes of a rank are written. GONE: the copies that the rank holds in memory are gone with it, as if its machine were.
SLOW: it takes its time there, in every step. NAN: gradients of its experts are not numbers. Nothing in the product
knows of this.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from typing import Any

from moesaic import cli
from moesaic.parallel.ranks import Ranks
from moesaic.parallel.staying_up.activity import Activity
from moesaic.parallel.staying_up.redundancy import Redundancy
from moesaic.sharded import local
from moesaic.train.sharded_checkpoints import ShardedCheckpoints

SLOW_SECONDS = 2.0
memories: list[Redundancy] = []


def arm(kind: str, operation: str, step: int) -> None:
    def strike() -> None:
        if kind == "SLOW":
            time.sleep(SLOW_SECONDS)
            return
        if kind == "GONE":
            memories[0].wait()
            shutil.rmtree(memories[0].folder / f"holder-{os.environ['RANK']}")
        os.kill(os.getpid(), signal.SIGSTOP if kind == "STOP" else signal.SIGKILL)

    enter, fill, begin, norm = Activity.enter, ShardedCheckpoints._fill, Redundancy.__init__, Ranks.norm

    def entered(self: Any, name: str, patient: bool = False) -> None:
        begins = name == operation and self.operation != "dispatch"  # and does not come back to it
        enter(self, name, patient)
        if begins and (self.step == step or kind == "SLOW"):
            strike()

    def filled(self: Any, fresh: Any, snapshot: Any) -> None:
        if operation == "writing" and snapshot.step == step:
            strike()
        fill(self, fresh, snapshot)

    def begun(self: Any, *args: Any) -> None:
        begin(self, *args)
        memories.append(self)

    def measured(self: Any, model: Any) -> Any:
        if kind == "NAN" and self.upkeep.activity.step == step:
            for name, parameter in model.named_parameters():
                if name == "layers.1.ffn.down_EDF":
                    local(parameter.grad).fill_(float("nan"))
        return norm(self, model)

    setattr(Activity, "enter", entered)  # noqa: B010 (a type checker would rather not see it)
    setattr(ShardedCheckpoints, "_fill", filled)  # noqa: B010
    setattr(Redundancy, "__init__", begun)  # noqa: B010
    setattr(Ranks, "norm", measured)  # noqa: B010


def main(faults: str, words: list[str]) -> int:
    attempts = dict(enumerate(filter(None, faults.split(","))))
    for fault in filter(None, attempts.get(int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "").split("+")):
        rank, kind, operation, step = fault.split(":")
        if rank == os.environ["RANK"]:
            arm(kind, operation, int(step))
    return cli.main(words)
