"""Compile many kernels at once, before they are needed: what an engine runs first would else compile one by one.

compile_launches(lambda: forward(x), device)     its launches compile in threads, and launch nothing
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

MOST = 16  # threads: more wait for Python's lock, which the compiler's frontend holds

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def only_compiling() -> bool:
    """Whether launches of this thread launch nothing, so that no result may be looked at."""
    return _compiling.get()


def compile_launches(run: Callable[[], object], device: torch.device) -> int:
    """Run something for the kernels it would launch: how many there are. What it computes means nothing. A kernel that
    does not compile says so when it is launched."""
    launch: Any = JITFunction.run
    found: dict[int, Any] = {}

    def compiled(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not only_compiling():  # another thread's
            return launch(self, *arguments, grid=grid, warmup=warmup, **options)
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        if isinstance(kernel, triton.FutureKernel) and kernel.future.done():
            kernel = kernel.result(ignore_errors=True)  # and then it is found at once
        found[id(kernel)] = kernel
        return kernel

    threads = min(MOST, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,)) as pool:
        before = _compiling.set(True)
        JITFunction.run = compiled
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True):
                run()
        finally:
            JITFunction.run = launch
            _compiling.reset(before)
        list(pool.map(_load, found.values()))
    return len(found)


def _load(kernel: Any) -> None:
    """Its launcher, which a C compiler makes, and its code on the device."""
    if isinstance(kernel, triton.FutureKernel):
        kernel = kernel.result(ignore_errors=True)
    with contextlib.suppress(Exception):
        kernel.run  # noqa: B018  looking at it is what loads
