"""Training a model whose state does not fit on the GPU: offload, beside memory where that fits and beside FSDP2's.

    python bench/gpu_offload.py                              all rows on an H200 with 128 GiB of host memory (6 minutes)
    python bench/gpu_offload.py --rows large                 only the model that does not fit
    python bench/gpu_offload.py --device cpu --tiny          the same program at a size for two cores (some minutes)

Rows: `memory`, `offload`, `speculative`, `delay` and `fsdp2` train a mixture of --layers layers; `large-memory` and
`large` one of --large layers, whose 16 bytes per parameter are more than the GPU has, `large-shared` the same with the
state of its first layers on the GPU; `activations`, `nvme`, `large-delay` and `largest` (shared too) run if named. All
take the same steps: bfloat16 weights, AdamW with float32 weights and moments, clipping, --accumulate micro-batches of
--sequences x --length tokens. Every row is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from bench.measure import record
from moesaic import kernels
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.offload.activations import ActivationOffload, saved_activations
from moesaic.recipe_offload import OffloadSection
from moesaic.train.optimizers._offloaded import OffloadedOptimizer
from moesaic.train.optimizers.adamw import AdamW

HEAD_SIZE, LR, GIB = 128, 1e-4, 2**30
USUAL = ["memory", "offload", "speculative", "delay", "fsdp2", "large-memory", "large", "large-shared"]
FURTHER = ["activations", "nvme", "large-delay", "largest"]
TINY = {
    "layers": 2, "large": 4, "largest": 6, "hidden": 64, "experts": 4, "expert_hidden": 32, "vocab": 256,
    "sequences": 2, "length": 32, "accumulate": 2,
}  # fmt: skip


def config_of(options: argparse.Namespace, layers: int) -> ModelConfig:
    experts = Experts(options.experts, min(8, options.experts), options.expert_hidden)
    return ModelConfig(
        family="qwen3_moe",
        vocab=options.vocab,
        hidden=options.hidden,
        attention=GroupedQuery(max(options.hidden // 64, 1), max(options.hidden // 512, 1), HEAD_SIZE, qk_norm=True),
        rope=Rope(HEAD_SIZE, theta=1e6),
        layers=tuple(Layer(experts) for _ in range(layers)),
        context=max(8192, options.length),
        dtype="bfloat16",
    )


@torch.no_grad()
def fill(parameter: Tensor, device: torch.device) -> None:
    """First weights, made on the device: a host would take longer over them than over the steps."""
    if parameter.dim() > 1:
        parameter.copy_(torch.empty(parameter.shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02))
    else:
        parameter.fill_(1.0)


def on_device(config: ModelConfig, device: torch.device) -> Model:
    """Made in its place, parameter by parameter: it is never there twice."""
    with torch.device("meta"):
        model = Model(config).to(torch.bfloat16)
    assert not list(model.buffers()), "they would have to be made too"
    model.to_empty(device=device)
    for parameter in model.parameters():
        fill(parameter, device)
    return model


def tokens_of(options: argparse.Namespace, number: int, device: torch.device) -> Tensor:
    """Each row repeats a short passage of its own: something to learn."""
    generator = torch.Generator().manual_seed(1000 + number)
    passages = torch.randint(options.vocab, (options.sequences, 64), generator=generator).to(device)
    return passages.repeat(1, options.length // 64 + 1)[:, : options.length + 1]


def backward(model: Model, options: argparse.Namespace, number: int, device: torch.device, saved: Any) -> Tensor:
    count = options.sequences * options.length
    tokens = tokens_of(options, number, device)
    with saved:
        hidden_TD = model(tokens[:, :-1].reshape(-1), Layout([options.length] * options.sequences, device=device))
        scale_T = torch.full((count,), 1 / (count * options.accumulate), device=device)
        loss, _ = model.cross_entropy(hidden_TD, tokens[:, 1:].reshape(-1), scale_T)
    loss.backward()
    return loss.detach()


Stepper = Callable[[int], Tensor]


def ours(options: argparse.Namespace, row: str, layers: int, device: torch.device) -> tuple[Stepper, dict[str, Any]]:
    model = on_device(config_of(options, layers), device)
    kind = {"large": "offload", "largest": "shared"}.get(row, row.removeprefix("large-"))
    folder = options.folder or tempfile.gettempdir()
    settings = {
        "memory": None,
        "offload": OffloadSection(),
        "speculative": OffloadSection(speculative=options.undo),
        "delay": OffloadSection(delay=True),
        "shared": OffloadSection(on_device=options.on_device),
        "activations": OffloadSection(activations=True),
        "nvme": OffloadSection(optimizer=folder),
    }[kind]
    optimizer = AdamW(lr=LR).build(model.named_parameters(), offload=settings)
    saved = saved_activations(settings, model)
    facts: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    if isinstance(optimizer, OffloadedOptimizer):
        facts |= {"buckets": len(optimizer.buckets), "cast": optimizer.staging.cast}

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        optimizer.expect(options.accumulate, 1.0)
        first = number * options.accumulate
        loss = sum(backward(model, options, first + part, device, saved) for part in range(options.accumulate))
        assert isinstance(loss, Tensor)
        facts["norm"] = optimizer.step(1.0, clip=options.clip).norm
        if isinstance(optimizer, OffloadedOptimizer):
            facts["rollbacks"] = optimizer.rollbacks
        if isinstance(saved, ActivationOffload):
            facts["activation_gib"] = round(saved.bytes / GIB, 2)
        return loss

    return step, facts


def fsdp2(options: argparse.Namespace, layers: int, device: torch.device) -> tuple[Stepper, dict[str, Any]]:
    """PyTorch's own: float32 weights on the host, bfloat16 copies on the GPU while used, fused AdamW on the CPU."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

    store = dist.FileStore(tempfile.mkdtemp() + "/store", 1)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    with torch.device("meta"):
        model = Model(config_of(options, layers))
    policy: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        "reshard_after_forward": False,  # all weights fit on the GPU: they need not travel twice
    }
    for block in model.layers:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        fill(parameter.to_local(), device)  # type: ignore[operator]
    model.ops = kernels.choose(device, model.mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    saved = saved_activations(None, model)
    facts: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def step(number: int) -> Tensor:
        total = torch.zeros((), device=device)
        for part in range(options.accumulate):
            last = part == options.accumulate - 1
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(last)  # gradients add up on the GPU
            model.set_reshard_after_backward(last)  # and weights stay there
            total += backward(model, options, number * options.accumulate + part, device, saved)  # type: ignore[arg-type]
        facts["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step, facts


def run_row(options: argparse.Namespace, row: str) -> dict[str, Any]:
    """One row, in this process."""
    device = torch.device(options.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    torch.manual_seed(0)
    layers = options.largest if row == "largest" else options.large if row.startswith("large") else options.layers
    begun = time.perf_counter()
    result: dict[str, Any] = {"row": row, "layers": layers}
    try:
        step, facts = fsdp2(options, layers, device) if row == "fsdp2" else ours(options, row, layers, device)
        built = time.perf_counter() - begun
        losses = [step(number) for number in range(options.warm)]
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses += [step(number) for number in range(options.warm, options.warm + options.steps)]
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - start) / options.steps
    except torch.cuda.OutOfMemoryError as error:
        return result | {"fits": False, "error": str(error).partition(". ")[0]}
    norm = facts.pop("norm")
    tokens = options.sequences * options.length * options.accumulate
    result |= {"fits": True} | facts
    result |= {
        "tokens_per_second": round(tokens / seconds),
        "step_seconds": round(seconds, 3),
        "build_seconds": round(built, 1),
        "state_gib": round(16 * facts["parameters"] / GIB, 1),
        "gpu_peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 1) if cuda else None,
        "host_peak_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 1),
        "last_norm": round(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm), 3),
        "losses": [round(float(loss), 4) for loss in losses],
    }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", nargs="*", default=USUAL, choices=[*USUAL, *FURTHER])
    parser.add_argument("--layers", type=int, default=12, help="3.98 B parameters: 59 GiB of state")
    parser.add_argument("--large", type=int, default=29, help="9.43 B parameters: 141 GiB, of which the host holds 105")
    parser.add_argument("--largest", type=int, default=42, help="13.6 B parameters: 203 GiB")
    for name, usual in (("hidden", 2048), ("experts", 64), ("expert-hidden", 768), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    for name, usual in (("sequences", 2), ("length", 4096), ("accumulate", 16), ("steps", 3), ("warm", 2)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--clip", type=float, default=10.0)
    parser.add_argument("--undo", type=float, default=24.0, help="GiB of host memory for speculation")
    parser.add_argument("--on-device", type=float, default=60.0, help="GiB of GPU memory for state, in shared rows")
    parser.add_argument("--folder", help="of the row nvme")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=240, help="seconds a row may take")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        for name, value in TINY.items():
            setattr(options, name, value)
    if options.row:
        print(json.dumps(run_row(options, options.row)), flush=True)
        return
    rows = []
    for row in options.rows:
        # Memory that is freed goes back at once, so that fragments do not count against what fits.
        environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        try:
            done = subprocess.run(
                [sys.executable, *sys.argv, "--row", row],
                stdout=subprocess.PIPE,
                text=True,
                timeout=options.limit,
                env=environment,
            )
            lines = done.stdout.strip().splitlines()
            found = json.loads(lines[-1]) if lines and not done.returncode else {"row": row, "exit": done.returncode}
        except subprocess.TimeoutExpired:
            found = {"row": row, "error": f"not done after {options.limit:g} s"}
        rows.append(found)
        print(json.dumps(found), flush=True)
    by = {row["row"]: row for row in rows if "tokens_per_second" in row}
    for name, row in by.items():
        for other in ("memory", "fsdp2"):
            if other in by and name not in (other, "memory", "fsdp2") and row["layers"] == by[other]["layers"]:
                print(f"{name}: {row['tokens_per_second'] / by[other]['tokens_per_second']:.2f}x {other}")
    if options.device == "cuda":
        facts = {
            name: value for name, value in vars(options).items() if name not in ("rows", "row", "folder", "device")
        }
        print(f"wrote {record('gpu_offload', rows, **facts)}")


if __name__ == "__main__":
    main()
