"""Training in a process that a test kills, again and again.

All processes are forks of one that has imported what they need and computed nothing: starting one takes no time.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch


def start(recipe_file: Path, out: Path, *overrides: str) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["moesaic.train.pretrain", "moesaic.recipe", __name__])
    process = context.Process(target=train, args=(recipe_file, out, overrides, torch.get_num_threads()))
    process.start()
    return process


def train(recipe_file: Path, out: Path, overrides: tuple[str, ...], threads: int) -> None:
    from moesaic.recipe import load_recipe
    from moesaic.train.pretrain import pretrain

    torch.set_num_threads(threads)  # the bits depend on it
    pretrain(load_recipe(recipe_file, overrides), out, quiet=True)
