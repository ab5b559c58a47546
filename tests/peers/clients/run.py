"""Runs the checks of one client library against a server, in the environment that has the library.

    python run.py use_anthropic.py URL        # every function check_* of the file, each by its name

A failed check prints its traceback, and the exit code is 1. What a check needs of the server is in `Target`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

MODEL = "tiny"
HANGS = 840.0  # seconds without an end: say where, before whoever waits gives up


@dataclass(frozen=True)
class Target:
    url: str
    model: str = MODEL
    key: str = "none"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


def main(path: str, url: str) -> int:
    faulthandler.dump_traceback_later(HANGS, exit=True)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pydantic looks up the names of annotations
    spec.loader.exec_module(module)
    failed = 0
    for name, check in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("check_"):
            continue
        try:
            result = check(Target(url))
            if inspect.iscoroutine(result):
                asyncio.run(result)
            print(f"ok      {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
