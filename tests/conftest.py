"""What every test runs under: one thread per worker, the same random numbers each time, no GPU tests without a GPU."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import sys
from pathlib import Path

# Workers side by side must not each take every core. Set before anything imports torch, which reads it once.
if "PYTEST_XDIST_WORKER" in os.environ:
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"
# A suite started in the background may have Ctrl-C ignored, which what it starts would inherit; some tests press it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Dozens of tests start a process: the package is compiled for the first of them, and not for each anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Triton reads it when a kernel is defined. Where there is a GPU, tests of the interpreter start a process of their own.
os.environ.setdefault("TRITON_INTERPRET", str(int(shutil.which("nvidia-smi") is None)))

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests import draws, forked
from tests.figures import leave_blank
from tests.slow import SLOW

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("moesaic", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("moesaic")
forked.import_everything()

TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before those that go by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {TESTS / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path, len(order)))
    for item in items:
        if item.path in order:
            item.add_marker(pytest.mark.slow)
    on_gpu = [item for item in items if TESTS / "gpu" in item.path.parents]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_configure() -> None:
    gc.disable()  # until all is imported and collected, of which nothing is garbage


def pytest_collection_finish() -> None:
    """A million objects of modules and collected tests are there to stay: the garbage collector need not walk them
    each time a test has made a few thousand, which took ten times as long as what some tests are about."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before fixtures, some of which train
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every run ends with a figure of its curves, which is rendered only in tests that are marked to look at it."""
    leave_blank(rendered=item.get_closest_marker("figures") is not None)
    draws.watch()


@pytest.fixture(scope="module")  # no longer: while it is open, this thread has an event loop that runs
def browser() -> Iterator[Browser]:
    from tests.chromium import chromium  # here, because most machines with a GPU have none

    with chromium() as found:
        yield found


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Every test begins with the same random numbers, whatever ran before it."""
    seed = 20_240
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)
    draws.begin_again()
    return seed
