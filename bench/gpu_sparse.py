"""2:4 weights on sparse tensor cores beside dense bf16 on one GPU: matmuls, then a whole model through the engine.

    python bench/gpu_sparse.py                     about 4 minutes on an H200
    python bench/gpu_sparse.py --parts matmuls     about 1.5 of them
    python bench/gpu_sparse.py --tiny              on a CPU, in seconds: every line runs, and no number means anything

Matmuls: projections and single experts at the widths of published models, microseconds in a CUDA graph over so many
copies of the matrix that it comes from memory; `dense` is what the engine runs, `library` torch's own, `sparse`
cuSPARSELt as it is, `searched` with the algorithm it finds fastest for these rows. `same_bits` is whether a row alone
has the bits it has among all. Goal: above 1.2 times dense at 4,096 rows.

The model: 16 layers of Llama-3-8B's widths with random weights, any two of every four kept; dense and sparse engines
hold the same numbers. Milliseconds a decode step, tokens/s of prompts of 2,048 tokens, and how far the logits are
apart. What fails is written down and the rest goes on. Writes bench/results/gpu_sparse.json after every row.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.measure import record
from bench.random_weights import random_model
from moesaic.kernels.cuda.sparse_weight import SparseWeight, has_sparse_cores
from moesaic.model.config import Dense, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.sparse import install_sparse, matrices, sparse_bytes, to_sparse_cores

# Inputs, outputs, and what it is.
SHAPES = (
    (4096, 6144, "Llama-3-8B, queries, keys and values"),
    (4096, 28672, "Llama-3-8B, gate and up"),
    (14336, 4096, "Llama-3-8B, down"),
    (8192, 57344, "Llama-3-70B, gate and up"),
    (4096, 2816, "GLM-4.5-Air, one expert's gate and up"),
    (2048, 1536, "Qwen3-30B, one expert's gate and up"),
)
ROWS = (1, 16, 64, 256, 1024, 4096, 16384)
TOTAL = 1e9  # bytes of copies of a matrix


def two_of_four(weight_OI: torch.Tensor) -> torch.Tensor:
    """Any two of four: random weights have none that matter more, and to choose by size takes minutes here."""
    pairs_64 = torch.tensor([[a in pair for a in range(4)] for pair in itertools.combinations(range(4), 2)])
    choice_OX = torch.randint(6, (weight_OI.shape[0], weight_OI.shape[1] // 4), device=weight_OI.device)
    return weight_OI * pairs_64.to(weight_OI.device)[choice_OX].flatten(1)


def microseconds(run: Callable[[int], object], calls: int, times: int = 5) -> tuple[float, bool]:
    """Median per call of one CUDA graph of them; of plain launches (False) where they cannot be captured."""
    if not torch.cuda.is_available():
        return seconds_of(lambda: run(0)) * 1e6, False
    run(0)
    torch.cuda.synchronize()
    replay, graphed = (lambda: [run(number) for number in range(calls)]), False
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(calls):
                run(number)
        replay, graphed = graph.replay, True
    except RuntimeError as error:
        print(f"not captured: {error}", flush=True)
        torch.cuda.synchronize()
    replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(times):
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(found), graphed


def seconds_of(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begun = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def searched(sparse: SparseWeight, x_TI: torch.Tensor) -> int:
    """The algorithm that the library finds fastest for these rows."""
    if not x_TI.is_cuda:
        return 0
    return int(torch.ops.aten._cslt_sparse_mm_search(sparse.packed, x_TI.t(), transpose_result=True))


def matmuls(inputs: int, outputs: int, counts: Sequence[int], device: torch.device) -> Iterator[dict[str, Any]]:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    copies = max(1, min(16, int(TOTAL // (2 * inputs * outputs)))) if device.type == "cuda" else 1
    weights = [two_of_four(random(outputs, inputs) / inputs**0.5) for _ in range(copies)]
    sparse = [SparseWeight(weight) for weight in weights]
    x_TI = random(max(8, *counts), inputs)
    for rows in counts:
        yield matmul(weights, sparse, x_TI, rows)


@torch.no_grad()
def matmul(weights: list[torch.Tensor], sparse: list[SparseWeight], x_TI: torch.Tensor, rows: int) -> dict[str, Any]:
    (outputs, inputs), copies, few_TI = weights[0].shape, len(weights), x_TI[:rows]
    calls = copies * max(1, 16 // copies)
    for one in sparse:
        one.algorithm = 0
    ways: dict[str, Callable[[int], torch.Tensor]] = {
        "library": lambda i: torch.nn.functional.linear(few_TI, weights[i % copies]),
        "sparse": lambda i: sparse[i % copies].linear(few_TI),
    }
    if x_TI.is_cuda:
        from moesaic.kernels.triton.linear import linear

        ways = {"dense": lambda i: linear(few_TI, weights[i % copies]), **ways}
    row: dict[str, Any] = {"rows": rows, "captured": True}
    wanted = few_TI.float() @ weights[0].float().T
    found = ways["sparse"](0)
    row["error"] = round(((found.float() - wanted).norm() / wanted.norm()).item(), 6)
    row["same_bits"] = bool(torch.equal(sparse[0].linear(x_TI[:1])[0], found[0]))
    for way, run in ways.items():
        us, graphed = microseconds(run, calls)
        row[way] = round(us, 2)
        row["captured"] &= graphed
    row["algorithm"] = searched(sparse[0], x_TI[: max(8, rows)])
    for one in sparse:
        one.algorithm = row["algorithm"]
    row["searched"] = round(microseconds(ways["sparse"], calls)[0], 2)
    dense = row.get("dense", row["library"])
    row["times_dense"] = round(dense / row["searched"], 3)
    row["tflops_dense"] = round(2 * rows * inputs * outputs / dense / 1e6, 1)
    return row


def make_model(tiny: bool, device: torch.device) -> Model:
    hidden, ffn, layers, heads = (64, 128, 2, (4, 2)) if tiny else (4096, 14336, 16, (32, 8))
    config = ModelConfig(
        family="llama",
        vocab=256 if tiny else 32000,
        hidden=hidden,
        attention=GroupedQuery(*heads, hidden // heads[0]),
        rope=Rope(hidden // heads[0], theta=5e5),
        layers=(Layer(Dense(ffn)),) * layers,
        context=8192,
        dtype="bfloat16",
    )
    model = random_model(config, device).requires_grad_(False)
    for _, weight in matrices(model):
        weight.copy_(two_of_four(weight))
    return model


def decode_ms(engine: Engine, prompts: list[list[int]], out: int) -> float:
    """Milliseconds per step once all prompts are read."""
    sampling = Sampling(max_tokens=out, temperature=0.0, ignore_eos=True)
    requests = [engine.request(prompt, sampling) for prompt in prompts]
    for request in requests:
        engine.add(request)
    while any(request.written < 4 for request in requests):
        engine.step()
    before, begun = requests[-1].written, time.perf_counter()
    while all(request.finish_reason is None for request in requests):
        engine.step()
    seconds = time.perf_counter() - begun
    steps = requests[-1].written - before
    while engine.working:
        engine.step()
    return seconds / max(1, steps) * 1000


def served(model: Model, name: str, tiny: bool) -> dict[str, Any]:
    counts, length, prompt, out = ((1, 2), 24, 16, 8) if tiny else ((1, 16, 64), 2048, 64, 64)
    vocab = model.config.vocab
    draw = torch.Generator().manual_seed(1)
    engine = Engine(model, cache_bytes=(1 << 24) if tiny else (6 << 30), max_requests=max(counts), reuse_prefixes=False)
    long = torch.randint(vocab, (4, length), generator=draw).tolist()

    def read() -> None:
        engine.generate(long, max_tokens=1, temperature=0.0)

    read()
    row: dict[str, Any] = {"model": name, "runner": type(engine.runner).__name__}
    row["prompt_tokens_per_second"] = round(4 * length / min(seconds_of(read) for _ in range(3)))
    for count in counts:
        prompts = torch.randint(vocab, (count, prompt), generator=draw).tolist()
        decode_ms(engine, prompts, out)
        row[f"step_ms_{count}"] = round(min(decode_ms(engine, prompts, out) for _ in range(2)), 3)
    row["matrix_bytes"] = sum(weight.numel() * 2 for _, weight in matrices(model)) + sum(
        part.packed.numel() * part.packed.element_size() for part in model.modules() if isinstance(part, SparseWeight)
    )
    return row


def whole_model(tiny: bool, device: torch.device) -> list[dict[str, Any]]:
    model = make_model(tiny, device)
    tokens = torch.randint(model.config.vocab, (256,), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [served(model, "dense", tiny)]
    wanted = model.logits([tokens])[0].float()
    expected = sum(sparse_bytes(weight) for _, weight in matrices(model))
    installed = install_sparse(model) if tiny else to_sparse_cores(model)
    rows.append({**served(model, "sparse", tiny), "matrices": installed, "expected_bytes": expected})
    found = model.logits([tokens])[0].float()
    rows[1]["logits_apart"] = round(((found - wanted).norm() / wanted.norm()).item(), 6)
    rows[1]["same_greedy"] = round((found.argmax(-1) == wanted.argmax(-1)).float().mean().item(), 4)
    keys = [key for key in rows[0] if key.startswith("step_ms")]
    rows[1]["times_dense"] = {key: round(rows[0][key] / rows[1][key], 3) for key in keys} | {
        "prompts": round(rows[1]["prompt_tokens_per_second"] / rows[0]["prompt_tokens_per_second"], 3)
    }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="*", default=["matmuls", "model"], choices=["matmuls", "model"])
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU, recorded nowhere")
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    if not options.tiny and not has_sparse_cores(device):
        raise SystemExit(f"no cuSPARSELt or no sparse tensor cores here: {torch.backends.cusparselt.is_available()=}")
    shapes = ((64, 96, "small"), (32, 48, "smaller")) if options.tiny else SHAPES
    table: list[dict[str, Any]] = []
    failed: list[str] = []

    def save() -> None:
        if not options.tiny:
            version = torch.backends.cusparselt.version()
            record("gpu_sparse", table, cusparselt=version, failed=failed)

    def tried(what: str, named: dict[str, Any], run: Callable[[], Iterable[dict[str, Any]]]) -> None:
        try:
            for row in run():
                table.append(named | row)
                print(table[-1], flush=True)
                save()
        except Exception as error:
            failed.append(f"{what}: {type(error).__name__}: {error}"[:300])
            traceback.print_exc()
            save()

    if "matmuls" in options.parts:
        for inputs, outputs, what in shapes:
            named = {"what": what, "inputs": inputs, "outputs": outputs}
            counts = (1, 3, 16) if options.tiny else ROWS
            tried(what, named, lambda i=inputs, o=outputs, c=counts: matmuls(i, o, c, device))  # type: ignore[misc]
            if not options.tiny:
                torch.cuda.empty_cache()
    if "model" in options.parts:
        tried("model", {}, lambda: whole_model(options.tiny, device))
    print("failed:", failed or "nothing", flush=True)
    if options.tiny and failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
