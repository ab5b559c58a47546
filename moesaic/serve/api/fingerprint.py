"""A short name of a model's weights, read fast enough for a server's start: two directories with the same one hold, as
far as samples show, the same weights. (`serve/pages/identity.py` reads every byte, where pages depend on them.)"""

from __future__ import annotations

import hashlib
from pathlib import Path

SUFFIXES = {".safetensors", ".gguf"}
HEAD = 1 << 20  # bytes at the start of a file: names and shapes of its tensors, in most
SAMPLES = 64  # of each file, evenly spread
SAMPLE = 4096  # bytes


def weights_fingerprint(directory: Path) -> str:
    """ "": there is nothing, which is told where the model is loaded."""
    if not directory.exists():
        return ""
    whole = hashlib.blake2b(digest_size=16)
    files = [directory] if directory.is_file() else sorted(directory.iterdir())
    for path in files:
        if path.name == "config.json":
            whole.update(path.read_bytes())
        elif path.suffix in SUFFIXES:
            size = path.stat().st_size
            whole.update(f"{size}".encode())
            with path.open("rb") as file:
                whole.update(file.read(HEAD))
                for place in range(SAMPLES):
                    file.seek(place * max(1, size - SAMPLE) // SAMPLES)
                    whole.update(file.read(SAMPLE))
    return whole.hexdigest()
