"""The MoE layer on one GPU against sort + F.grouped_mm + torch.compile, in one run.

    python bench/gpu_experts.py --out results.json                 training and serving tables (about 5 minutes)
    python bench/gpu_experts.py --part kernels --shapes Qwen3-30B  where the time goes, kernel by kernel

Training figures are steady state: 0.7 s of load before timing, because a GPU under power limit slows down. Operations
are counted as 6 D F K T forward and three times that forward+backward.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import sys
import time
from dataclasses import replace

import torch
import torch.nn.functional as functional
import triton

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from moesaic.kernels.triton.experts import rows
from moesaic.kernels.triton.experts.layer import experts
from moesaic.kernels.triton.experts.sort import route
from moesaic.kernels.triton.experts.tuning import Choice, choose, streamed

SHAPES = {
    "GLM-4.5-Air": (4096, 1408, 128, 8),
    "Qwen3-30B": (2048, 768, 128, 8),
    "Mixtral": (4096, 14336, 8, 2),
    "gpt-oss": (2880, 2880, 32, 4),
}  # D F E K
READ_BANDWIDTH = 4.6e12  # bytes/s, measured on an H200
# Microseconds of the fastest serving kernel measured elsewhere on the same machine (vLLM's Triton MoE), for reference.
SERVING_REFERENCE = {
    "Qwen3-30B": {1: 29.6, 16: 195, 64: 299, 256: 324, 1024: 405},
    "GLM-4.5-Air": {1: 78, 16: 640, 64: 1004, 256: 1097, 1024: 1343},
}


def problem(shape, T, seed=0):
    D, F, E, K = shape
    torch.manual_seed(seed)
    routes_TK = torch.rand(T, E, device="cuda").topk(K, dim=-1).indices
    weights_TK = torch.softmax(torch.randn(T, K, device="cuda"), -1)
    gate_up = torch.empty(E, 2 * F, D, device="cuda", dtype=torch.bfloat16).normal_(0, D**-0.5)
    down = torch.empty(E, D, F, device="cuda", dtype=torch.bfloat16).normal_(0, F**-0.5)
    return torch.randn(T, D, device="cuda", dtype=torch.bfloat16), routes_TK, weights_TK, gate_up, down


def count(flat_N, experts):
    """How often each expert occurs, without asking the host (bincount does)."""
    return torch.histc(flat_N, bins=experts, min=0, max=experts)


def peer_gather(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF):
    """Sort, grouped_mm, back to token order by the inverse permutation, sum over k."""
    T, K = routes_TK.shape
    F = down_EDF.shape[2]
    flat_N = routes_TK.view(-1)
    order_N = torch.argsort(flat_N, stable=True)
    offsets_E = count(flat_N, down_EDF.shape[0]).cumsum(0).to(torch.int32)
    sorted_ND = x_TD[order_N // K]
    both_NG = functional.grouped_mm(sorted_ND, gate_up_EGD.transpose(-2, -1), offs=offsets_E)
    hidden_NF = functional.silu(both_NG[:, :F]) * both_NG[:, F:]
    out_ND = functional.grouped_mm(hidden_NF, down_EDF.transpose(-2, -1), offs=offsets_E)
    out_ND = (out_ND.float() * weights_TK.view(-1)[order_N, None]).to(x_TD.dtype)
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(T * K, device=x_TD.device))
    return out_ND[inverse_N].view(T, K, -1).float().sum(1).to(x_TD.dtype)


def peer_scatter(x_TD, routes_TK, weights_TK, gate_up_EGD, down_EDF):
    """The same with a scatter-add at the end (torchtitan's form)."""
    K, F = routes_TK.shape[1], down_EDF.shape[2]
    flat_N = routes_TK.view(-1)
    order_N = torch.argsort(flat_N, stable=True)
    offsets_E = count(flat_N, down_EDF.shape[0]).cumsum(0).to(torch.int32)
    token_N = order_N // K
    both_NG = functional.grouped_mm(x_TD[token_N], gate_up_EGD.transpose(-2, -1), offs=offsets_E)
    hidden_NF = functional.silu(both_NG[:, :F]) * both_NG[:, F:]
    out_ND = functional.grouped_mm(hidden_NF, down_EDF.transpose(-2, -1), offs=offsets_E)
    out_ND = (out_ND.float() * weights_TK.view(-1)[order_N, None]).to(x_TD.dtype)
    return torch.zeros_like(x_TD).scatter_add(0, token_N[:, None].expand_as(out_ND), out_ND)


def steady(run, load=0.7, measure=0.5):
    """Median seconds per call after `load` seconds of the same work."""
    run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(), run(), run(), end.record()
    torch.cuda.synchronize()
    once = start.elapsed_time(end) / 2000
    for _ in range(max(1, int(load / once))):
        run()
    batch = max(1, int(measure / 5 / once))
    times = []
    for _ in range(5):
        start.record()
        for _ in range(batch):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / batch)
    return statistics.median(times)


def trainer(layer, inputs):
    x, routes, weights, gate_up, down = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weights, gate_up, down)]
    grad = torch.randn_like(x)

    def step():
        torch.autograd.grad(layer(leaves[0], routes, *leaves[1:]), leaves, grad)

    return step


def extra_memory(run):
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def changed(variant):
    """Our layer with some fields of its choice changed, as "gather_x=0,chain=0"."""
    changes = {key: int(value) for key, value in (item.split("=") for item in variant.split(",") if item)}

    def layer(x, routes, weights, gate_up, down):
        choice = replace(choose(x, routes, gate_up, torch.is_grad_enabled()), **changes)
        return experts(x, routes, weights, gate_up, down, choice=choice)

    return layer


def training(shapes, T, peers, variants, load):
    table = {}
    ours = {"ours": experts} | {f"ours {variant}": changed(variant) for variant in variants}
    for name in shapes:
        D, F, E, K = SHAPES[name]
        inputs = problem(SHAPES[name], T)
        work = 6 * D * F * K * T
        row = {}
        for label, layer in (ours | peers).items():
            torch._dynamo.reset()
            with torch.no_grad():
                forward = steady(lambda: layer(*inputs), load, load / 2)
            step = trainer(layer, inputs)
            both = steady(step, load, load / 2)
            row[label] = {
                "forward_tflops": work / forward / 1e12,
                "both_tflops": 3 * work / both / 1e12,
                "forward_ms": forward * 1e3,
                "both_ms": both * 1e3,
                "extra_gib": extra_memory(step),
            }
        table[name] = row
    return table


def kernels(shapes, T, sweep, only):
    """Seconds of each part of a training step, each timed alone under load."""
    from moesaic.kernels.triton.experts.hopper import grouped as hopper

    table = {}
    for name in shapes:
        D, F, E, K = SHAPES[name]
        x, routes, weights, gate_up, down = problem(SHAPES[name], T)
        routing = route(routes, E, 128)
        unit = 2 * D * F * K * T
        gate_up_PG, hidden_PF = hopper.gate_up(x, gate_up, routing, True, K)
        x_PD = rows.permute(x, routing, K)
        out_PD = hopper.rows(hidden_PF, down, routing, False)
        grad_PG, _, parts_XP = hopper.grad_gate_up(x, down, gate_up_PG, weights, routing, False, True)
        parts = {
            "route": (0, lambda: route(routes, E, 128)),
            "spread": (0, lambda: rows.permute(x, routing, K)),
            "gate_up": (2, lambda: hopper.gate_up(x_PD, gate_up, routing, True)),
            "gate_up, gathered": (2, lambda: hopper.gate_up(x, gate_up, routing, True, K)),
            "down": (1, lambda: hopper.rows(hidden_PF, down, routing, False)),
            "combine": (0, lambda: rows.combine(out_PD, routing, weights, T, K)),
            "grad hidden": (1, lambda: hopper.rows(x_PD, down, routing, True)),
            "grad hidden, gathered": (1, lambda: hopper.rows(x, down, routing, True, K)),
            "swiglu backward": (0, lambda: rows.swiglu_backward(hidden_PF, gate_up_PG, weights, routing, False)),
            "grad hidden+swiglu": (
                1,
                lambda: hopper.grad_gate_up(x_PD, down, gate_up_PG, weights, routing, False, False),
            ),
            "grad hidden+swiglu, gathered": (
                1,
                lambda: hopper.grad_gate_up(x, down, gate_up_PG, weights, routing, False, True),
            ),
            "sum parts": (0, lambda: rows.sum_parts(parts_XP, routing, weights)),
            "grad down": (1, lambda: hopper.columns(x_PD, hidden_PF, routing)),
            "grad down, gathered": (1, lambda: hopper.columns(x, hidden_PF, routing, True, False, K)),
            "grad x": (2, lambda: hopper.rows(grad_PG, gate_up, routing, True)),
            "grad gate_up": (2, lambda: hopper.columns(grad_PG, x_PD, routing)),
            "grad gate_up, gathered": (2, lambda: hopper.columns(grad_PG, x, routing, False, True, K)),
        }
        if sweep:
            for group in (2, 4, 16, 32):
                parts[f"gate_up group {group}"] = (
                    2,
                    lambda g=group: hopper.gate_up(x_PD, gate_up, routing, True, 0, g),
                )
                parts[f"down group {group}"] = (1, lambda g=group: hopper.rows(hidden_PF, down, routing, False, 0, g))
                parts[f"grad x group {group}"] = (
                    2,
                    lambda g=group: hopper.rows(grad_PG, gate_up, routing, True, 0, g),
                )
                parts[f"grad gate_up group {group}"] = (
                    2,
                    lambda g=group: hopper.columns(grad_PG, x_PD, routing, group=g),
                )
        table[name] = {}
        for part, (units, run) in parts.items():
            if only not in part:
                continue
            seconds = steady(run, load=0.2, measure=0.1)
            table[name][part] = {"us": seconds * 1e6, "tflops": units * unit / seconds / 1e12}
            print(
                f"{name:12} {part:24} {seconds * 1e6:9.1f} us  {units * unit / seconds / 1e12:7.0f} TFLOP/s", flush=True
            )
    return table


def graphed(calls, repeat=20):
    """Median microseconds per call over replays of a graph that holds every call once (inputs rotate), after a tenth of
    a second of them: a GPU that was idle while kernels were compiled is slow at first."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    begun = time.perf_counter()
    while time.perf_counter() - begun < 0.1:
        graph.replay()
        torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(repeat):
        start.record(), graph.replay(), end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def floor_us(shape, routes_TK, T):
    D, F, _, K = shape
    active = routes_TK.unique().numel()
    return max((active * 3 * D * F * 2 + 2 * T * D * 2) / READ_BANDWIDTH, 6 * D * F * K * T / 786e12) * 1e6


def serving(shapes, peers, sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)):
    table = {}
    for name in shapes:
        if name == "Mixtral":
            continue
        _, _, _, gate_up, down = problem(SHAPES[name], 1)
        table[name] = {}
        for T in sizes:
            sets = []
            for seed in range(8):
                torch.manual_seed(100 + seed)
                D, _, E, K = SHAPES[name]
                sets.append(
                    (
                        torch.randn(T, D, device="cuda", dtype=torch.bfloat16),
                        torch.rand(T, E, device="cuda").topk(K, dim=-1).indices,
                        torch.softmax(torch.randn(T, K, device="cuda"), -1),
                    )
                )
            row = {
                "floor_us": statistics.mean(floor_us(SHAPES[name], routes, T) for _, routes, _ in sets),
                "reference_us": SERVING_REFERENCE.get(name, {}).get(T),
            }
            with torch.no_grad():
                for label, layer in {"ours": experts, **peers}.items():
                    if label != "ours" and (T not in (16, 256, 1024) or "scatter" in label):
                        continue
                    row[label] = graphed([lambda s=s, layer=layer: layer(*s, gate_up, down) for s in sets])
                for path in ("decode", "streamed", "hopper"):
                    choice = choose(sets[0][0], sets[0][1], gate_up, False)
                    if path != choice.path and (T <= 8 if path == "decode" else 4 <= T <= 1024):
                        other = streamed(sets[0][0], SHAPES[name]) if path == "streamed" else Choice(path)
                        row[path] = graphed([lambda s=s: experts(*s, gate_up, down, choice=other) for s in sets])
            table[name][T] = row
            print(name, T, {key: value and round(value, 1) for key, value in row.items()}, flush=True)
    return table


def print_training(table, T, load):
    print(
        f"MoE layer, {T} tokens, bf16, steady state ({load} s of load before timing), {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}, triton {triton.__version__}: TFLOP/s forward | forward+backward | extra GiB"
    )
    for name, row in table.items():
        ours = row["ours"]
        others = [label for label in row if label != "ours"]
        line = f"{name:12} ours {ours['forward_tflops']:4.0f} | {ours['both_tflops']:4.0f} | {ours['extra_gib']:.2f}"
        for label in others:
            other = row[label]
            line += f"   {label} {other['forward_tflops']:4.0f} | {other['both_tflops']:4.0f}"
            line += f" | {other['extra_gib']:.2f}"
        peers = [row[label] for label in others if not label.startswith("ours")]
        if peers:
            ratios = (ours[key] / max(peer[key] for peer in peers) for key in ("forward_tflops", "both_tflops"))
            line += "   ratio " + " | ".join(f"{ratio:.2f}x" for ratio in ratios)
        print(line)


def print_serving(table):
    print("Serving, one layer in a CUDA graph, rotated inputs: microseconds (share of the floor)")
    for name, row in table.items():
        for T, cell in row.items():
            peers = "  ".join(
                f"{key} {value:.1f}" for key, value in cell.items() if value and key.startswith("grouped")
            )
            reference = (
                f"  reference {cell['reference_us']}: {cell['reference_us'] / cell['ours']:.2f}x"
                if cell["reference_us"]
                else ""
            )
            print(
                f"{name:12} T={T:5} ours {cell['ours']:8.1f} ({cell['floor_us'] / cell['ours']:.0%})  "
                f"{peers}{reference}"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="training,serving", help="of training, serving, kernels")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument(
        "--peers", default="grouped_mm,grouped_mm+scatter", help="which forms of the peer; empty for none"
    )
    parser.add_argument("--sweep", action="store_true", help="kernels: other tile orders too")
    parser.add_argument("--only", default="", help="kernels: those whose name holds this")
    parser.add_argument(
        "--variants", default="", help="training: ours with other choices too, as gather_x=0,chain=0;group=4"
    )
    parser.add_argument("--load", type=float, default=0.7, help="training: seconds of load before timing")
    parser.add_argument("--out", help="write JSON here")
    options = parser.parse_args()
    shapes = options.shapes.split(",")
    forms = {"grouped_mm": peer_gather, "grouped_mm+scatter": peer_scatter}
    peers = {name: torch.compile(forms[name], dynamic=False) for name in options.peers.split(",") if name}
    result = {
        "hardware": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "tokens": options.tokens,
    }
    parts = options.part.split(",")
    variants = [variant for variant in options.variants.split(";") if variant]
    if "kernels" in parts:
        result["kernels"] = kernels(shapes, options.tokens, options.sweep, options.only)
    if "training" in parts:
        result["training"] = training(shapes, options.tokens, peers, variants, options.load)
    if "serving" in parts:
        result["serving"] = serving(shapes, peers)
    if options.out:
        os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
    if "training" in parts:
        print_training(result["training"], options.tokens, options.load)
    if "serving" in parts:
        print_serving(result["serving"])


if __name__ == "__main__":
    main()
