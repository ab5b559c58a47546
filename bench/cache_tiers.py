"""Time to the first token of a prompt whose long prefix was served before, by where its pages are now.

    python -m bench.cache_tiers                      on a CPU, about two minutes
    python -m bench.cache_tiers --device cuda
    python -m bench.cache_tiers --tokens 256 --repeats 1         in seconds, to see that it runs

Rows: `cache` has the prefix in the KV cache; `host` and `disk` had it evicted there (files lie in the page cache of the
system, so "disk" is a copy with a checksum); `engine` gets it from another engine, by torch.distributed over loopback;
`recompute` has none of it. All rows must sample the same token: it is checked. The model has random weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.measure import record
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.memory import page_bytes
from moesaic.serve.core.request import Request, Sampling
from moesaic.serve.pages.outside import TierOptions
from moesaic.serve.pages.remote import Origin
from moesaic.serve.pages.server import page_server

PAGE = 16


def model_of(device: str) -> Model:
    layers = tuple(Layer(Experts(8, 2, 512)) for _ in range(8))
    attention = GroupedQuery(8, 2, 64, qk_norm=True)
    with torch.device("meta"):
        model = Model(
            ModelConfig("qwen3_moe", 8192, 512, attention, Rope(64, theta=1e6), layers, context=16384, dtype="float32")
        )
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
        else:
            parameter.data.fill_(1.0)
    return model


class Bench:
    def __init__(self, device: str, tokens: int, folder: Path) -> None:
        self.model = model_of(device)
        self.tokens = tokens
        self.bytes = page_bytes(self.model, PAGE, self.model.dtype)
        self.pages = tokens // PAGE
        self.folder = folder
        self.prefix = torch.randint(0, 8192, (tokens,), generator=torch.Generator().manual_seed(1)).tolist()
        self.others = [[token + 1 & 8191 for token in self.prefix], [token + 2 & 8191 for token in self.prefix]]

    def engine(self, tiers: TierOptions | None = None, room: float = 1.5) -> Engine:
        """With a KV cache for so many such prompts."""
        cache = int(self.pages * room + 8) * self.bytes
        return Engine(self.model, cache_bytes=cache, page_size=PAGE, max_requests=64, tiers=tiers)

    def first_token(self, engine: Engine, prompt: list[int], last: int, **options: Any) -> tuple[float, Request]:
        request = engine.request([*prompt, last], Sampling(max_tokens=1, temperature=0.0), **options)
        start = time.perf_counter()
        engine.complete([request])
        return time.perf_counter() - start, request

    # One row each: seconds, and the request

    def recompute(self, number: int) -> tuple[float, Request]:
        return self.first_token(self.engine(), self.prefix, 7)

    def cached(self, number: int) -> tuple[float, Request]:
        engine = self.engine()
        self.first_token(engine, self.prefix, 3)
        return self.first_token(engine, self.prefix, 7)

    def host(self, number: int) -> tuple[float, Request]:
        return self._evicted(TierOptions(host_bytes=4 * self.pages * self.bytes, page_seconds=60.0))

    def disk(self, number: int) -> tuple[float, Request]:
        folder = self.folder / str(number)
        return self._evicted(TierOptions(0, 8 * self.pages * (self.bytes + 100), folder, page_seconds=60.0))

    def _evicted(self, tiers: TierOptions) -> tuple[float, Request]:
        engine = self.engine(tiers)
        assert engine.outside is not None
        for prompt in (self.prefix, *self.others):
            self._quietly(engine, prompt)
        found = self.first_token(engine, self.prefix, 7)
        counts = engine.outside.counts
        came = counts.host_tokens + counts.disk_tokens
        assert came >= self.tokens - PAGE, f"{came} of {self.tokens} tokens came back"
        engine.outside.close()
        return found

    def _quietly(self, engine: Engine, prompt: list[int]) -> None:
        """In pieces, so that a disk keeps up with what is evicted: it would drop pages else."""
        assert engine.outside is not None
        for stop in range(32 * PAGE, len(prompt) + 32 * PAGE, 32 * PAGE):
            self.first_token(engine, prompt[:stop], 3)
            engine.outside.flush()

    def elsewhere(self, number: int) -> tuple[float, Request]:
        travel = TierOptions(travel=True, page_seconds=60.0)
        there, here = self.engine(travel), self.engine(travel)
        self.first_token(there, self.prefix, 3)
        with _serving(there) as ranks:
            self._from(here, ranks, self.others[0][: 2 * PAGE])  # the two have met
            found = self._from(here, ranks, self.prefix)
            assert found[1].transferred >= self.tokens - PAGE and here.outside is not None
            here.outside.close()
            return found

    def _from(self, engine: Engine, ranks: Any, prompt: list[int]) -> tuple[float, Request]:
        return self.first_token(engine, prompt, 7, origin=Origin(ranks))


@contextmanager
def _serving(engine: Engine) -> Iterator[Any]:
    server, ended = page_server(engine), threading.Event()
    assert server is not None

    def run() -> None:
        while not ended.wait(0.0005):
            engine.read_inbox()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server.ranks()
    finally:
        ended.set()
        thread.join()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given.device, given.tokens, Path(folder))
        kinds: dict[str, Callable[[int], tuple[float, Request]]] = {
            "cache": bench.cached,
            "host": bench.host,
            "disk": bench.disk,
            "engine": bench.elsewhere,
            "recompute": bench.recompute,
        }
        said = set()
        for name, run in kinds.items():
            found = [run(number) for number in range(given.repeats)]
            said |= {tuple(request.tokens[-1:]) for _, request in found}
            seconds = statistics.median(taken for taken, _ in found)
            rows.append({"pages": name, "ttft_ms": round(1000 * seconds, 1)})
        assert len(said) == 1, f"rows sampled other tokens: {said}"
        for row in rows:
            row["times_recompute"] = round(rows[-1]["ttft_ms"] / row["ttft_ms"], 1)
            print(f"{row['pages']:>10} {row['ttft_ms']:>9.1f} ms {row['times_recompute']:>7.1f} x")
        mib = round(bench.pages * bench.bytes / 2**20, 1)
        record(f"cache_tiers_{given.device}", rows, tokens=given.tokens, prefix_mib=mib)


if __name__ == "__main__":
    main()
