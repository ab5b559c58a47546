"""Run by `test_memory.py` in a process of its own: load a model in some way, let it write, and print by how many bytes
memory grew at its peak."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from moesaic.serve.core.engine import Engine
from moesaic.serve.offload.loading import load_served


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def write(directory: str, **options: object) -> list[list[int]]:
    engine = Engine(load_served(directory, threads=1, **options), cache_bytes=1 << 20, max_requests=4)  # type: ignore[arg-type]
    done = engine.generate([[1, 2, 3], list(range(20))], max_tokens=4, temperature=0.0)
    return [list(one.tokens) for one in done]


def main() -> None:
    small, directory, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    write(small, **({"offload": options["offload"]} if options else {}))  # so that code and libraries are there
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    tokens = write(directory, **options)
    print(json.dumps({"bytes": status("VmHWM") - before, "tokens": tokens}))


if __name__ == "__main__":
    main()
