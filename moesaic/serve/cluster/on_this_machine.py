"""Start workers as processes of this machine; on GPUs every rank has one of its own."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import torch

from moesaic.errors import UserError
from moesaic.serve.cluster.engine_process import EngineProcess
from moesaic.serve.cluster.kinds import engine_kind
from moesaic.serve.cluster.messages import EngineOptions, Ready
from moesaic.serve.core.memory import free_bytes

SPARE = 1.25  # times what a worker holds must be free for another


class OnThisMachine:
    """A device that `load_options` name by its number is shared by all who name it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[int, EngineProcess] = {}  # of GPUs

    def __call__(self, options: EngineOptions) -> EngineProcess:
        if not on_gpu(options.load_options) or ":" in str(options.load_options.get("device")):
            return EngineProcess.start(options)
        ranks = engine_kind(options).ranks
        with self._lock:
            free = self._free_gpus()
            if len(free) < ranks:
                raise UserError("--replicas", f"a worker needs {ranks} GPUs, and {len(free)} are free", "Start fewer.")
            worker = EngineProcess.start(replace(options, devices=tuple(f"cuda:{gpu}" for gpu in free[:ranks])))
            self._users |= dict.fromkeys(free[:ranks], worker)
        return worker

    def room(self, options: EngineOptions, like: Ready) -> bool:
        ranks = engine_kind(options).ranks
        if on_gpu(options.load_options):
            return len(self._free_gpus()) >= ranks
        return free_bytes(torch.device("cpu")) > SPARE * ranks * like.bytes

    def _free_gpus(self) -> list[int]:
        count = torch.cuda.device_count()
        return [gpu for gpu in range(count) if gpu not in self._users or not self._users[gpu].alive]


def on_gpu(load_options: dict[str, Any]) -> bool:
    return torch.cuda.is_available() and str(load_options.get("device") or "cuda").startswith("cuda")
