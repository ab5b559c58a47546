"""A rank of a worker group that may take only so much more memory than it had before it reads the model.

python -m tests.serve.group.limited_rank RANK RANKS DIRECTORY FOLDER BYTES
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from moesaic.serve.group.ranks import follow, join, open_engine, serving_layout
from tests.serve.group.groups import answers, some_requests


def data_bytes() -> int:
    """Memory of its own that this process has asked for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def main(rank: int, ranks: int, directory: Path, folder: Path, room: int) -> None:
    torch.set_num_threads(1)
    group = join(serving_layout(f"tp={ranks}"), rank, f"file:{folder}/store{ranks}", stall_seconds=60.0)
    options: dict[str, Any] = {"page_size": 4, "cache_bytes": 2**20}
    limit = data_bytes() + room
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if rank:
        follow(group, directory, {"threads": 1}, options)
        return
    engine = open_engine(group, directory, {"threads": 1}, options)
    found = answers(engine, some_requests(3, tokens=3))
    engine.close()
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
