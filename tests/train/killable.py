"""Training in a process that dies, again and again, at a moment that a test chooses.

All processes are forks of one that has imported what they need and computed nothing: starting one takes no time. They
kill themselves, by how much they have done and not by a clock: a busy machine does not change when.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch


def start(recipe_file: Path, out: Path, *overrides: str, inside: bool, calls: int) -> ForkServerProcess:
    """It dies so many calls of Python functions after its first checkpoint began (`inside` of it, at the latest at its
    end), or after that was written, in whatever the loop is doing then."""
    context = multiprocessing.get_context("forkserver")
    arguments = (recipe_file, out, overrides, torch.get_num_threads(), inside, calls)
    process = context.Process(target=train, args=arguments)
    process.start()
    return process


def train(recipe_file: Path, out: Path, overrides: tuple[str, ...], threads: int, inside: bool, calls: int) -> None:
    from moesaic.recipe import load_recipe
    from moesaic.train import run
    from moesaic.train.checkpoints import Checkpoints, Snapshot
    from moesaic.train.pretrain import pretrain

    left, written, write = calls, threading.Event(), Checkpoints._write

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event == "call" and (inside or written.is_set()):
            left -= 1
            if left <= 0:
                die()

    def watched(self: Checkpoints, snapshot: Snapshot) -> int:
        if inside:  # this is the writer's thread
            sys.setprofile(count)
        step = write(self, snapshot)
        if inside:
            die()
        written.set()
        return step

    run.peak_flops = lambda device, dtype: 1e9  # type: ignore[attr-defined]  # measuring takes longer than many steps
    Checkpoints._write = watched  # type: ignore[method-assign]
    if not inside:
        sys.setprofile(count)
    torch.set_num_threads(threads)  # the bits depend on it
    pretrain(load_recipe(recipe_file, overrides), out, quiet=True)
