"""What ranks cost on the cores of one machine: two against one process, against plain FSDP2, and the memory of each.

python -m bench.parallel_cpu       about five minutes; writes bench/results/parallel_cpu.json

Speed: the 12M Qwen3-MoE of bench.train_cpu, 8 sequences of 256 tokens a step. One process has all cores; two ranks have
half of them each and half of the batch, by FSDP2 (ZeRO 2) and with the experts divided (ep=2). The peer is what one
writes by hand: `fully_shard` over the layers of `transformers`' same model, torch's fused AdamW, `clip_grad_norm_`.

Memory: bytes of weights, gradients and optimizer state that a rank holds after a step (exact), and by how much its peak
resident memory grew from before the model was made, on 1, 2 and 4 ranks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import transformers
from torch.distributed.fsdp import fully_shard

from bench.forward import MODELS
from bench.measure import machine, record
from moesaic.data.packing import Batch
from moesaic.kernels import hardware
from moesaic.model.context import Routing
from moesaic.model.formats.matching import match
from moesaic.model.formats.opening import open_checkpoint
from moesaic.parallel.layout import ParallelLayout
from moesaic.parallel.mesh import ParallelMesh
from moesaic.parallel.options import ParallelOptions
from moesaic.parallel.ranks import Ranks
from moesaic.parallel.world import World
from moesaic.sharded import local
from moesaic.train.objectives.next_token import NextToken
from moesaic.train.optimizers.adamw import AdamW

SEQUENCES, LENGTH = 8, 256
CPU = torch.device("cpu")
LARGE = dict(hidden_size=512, num_hidden_layers=8, moe_intermediate_size=512, num_experts=16, vocab_size=8192)


def batch_of(vocab: int, rank: int, ranks: int) -> tuple[torch.Tensor, Batch]:
    tokens = torch.randint(3, vocab, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    tokens = tokens.chunk(ranks)[rank]
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    count = SEQUENCES * (LENGTH - 1)
    return tokens, Batch(tokens.flatten(), targets.flatten(), [LENGTH] * len(tokens), [0] * len(tokens), count)


class Ours:
    """A step of the trainer, without its records."""

    def __init__(self, world: World, path: str) -> None:
        source = open_checkpoint(path)
        self.world = world
        self.model = world.build(match(source)[0], torch.float32, source)
        self.optimizer = AdamW(lr=1e-4).build(self.model.named_parameters())
        if world.ranks > 1:
            self.optimizer.norm = lambda: world.norm(self.model)  # type: ignore[method-assign]
        _, self.batch = batch_of(self.model.config.vocab, world.data_rank, world.data_ranks)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        NextToken()(self.model, self.batch, Routing()).total.backward()
        self.world.reduce_gradients(self.model)
        self.optimizer.step(1.0, clip=1.0)

    def state_bytes(self) -> int:
        held = [local(parameter) for parameter in self.model.parameters()]
        held += [local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        held += list(self.optimizer.state_dict().values())
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class Peer:
    def __init__(self, path: str, rank: int, ranks: int) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa").train()
        for layer in self.model.model.layers:
            fully_shard(layer, reshard_after_forward=False)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens, _ = batch_of(self.model.config.vocab_size, rank, ranks)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.tokens, labels=self.tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()


def timed(run: Any, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        run()
        if dist.is_initialized():
            dist.barrier()
        found.append(time.perf_counter() - start)
    return found


def two_ranks(rank: int, store: str, path: str, steps: int, out: str) -> None:
    torch.set_num_threads(max(1, hardware.threads() // 2))
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    runs: dict[str, Any] = {}
    for name, layout in (("fsdp", ParallelLayout(dp=2, zero=2)), ("ep", ParallelLayout(dp=2, ep=2, zero=2))):
        runs[name] = Ours(Ranks(ParallelMesh(layout, CPU), ParallelOptions()), path)
    runs["peer"] = Peer(path, rank, 2)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps):  # turn about
        for name, run in runs.items():
            times[name] += timed(run, 1)
    if rank == 0:
        torch.save({name: torch.tensor(all_times[2:]) for name, all_times in times.items()}, out)
    dist.barrier()


def resident(what: str) -> int:
    """VmRSS, what lies in memory now, or VmHWM, the most since it was last set back."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(what))) * 1024


def memory_of(rank: int, ranks: int, store: str, path: str, layout: ParallelLayout, out: str) -> None:
    torch.set_num_threads(1)
    world = World(CPU)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    if ranks > 1:
        world = Ranks(ParallelMesh(layout, CPU), ParallelOptions())
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back
    before = resident("VmRSS")
    ours = Ours(world, path)
    ours()
    ours()
    if rank == 0:
        torch.save(torch.tensor([ours.state_bytes(), resident("VmHWM") - before]), out)
    dist.barrier()


def make(path: str, **sizes: Any) -> None:
    settings = dict(MODELS["qwen3_moe 12M"], max_position_embeddings=2048) | sizes
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each side")
    parser.add_argument("--only-memory", action="store_true")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        small, large = f"{folder}/small", f"{folder}/large"
        make(small)
        make(large, **LARGE)
        if not arguments.only_memory:
            rows += speed(folder, small, arguments.steps)
        rows += memory(folder, large)
    if not arguments.only_memory:
        print(record("parallel_cpu", rows, steps=arguments.steps).relative_to(Path.cwd()))


def speed(folder: str, small: str, steps: int) -> list[dict[str, Any]]:
    torch.set_num_threads(hardware.threads())
    alone = statistics.median(timed(Ours(World(CPU), small), steps)[2:])
    out, tokens = f"{folder}/times", SEQUENCES * LENGTH
    processes.spawn(two_ranks, args=(f"{folder}/store", small, steps, out), nprocs=2)
    found = {name: float(times.median()) for name, times in torch.load(out, weights_only=True).items()}
    print(f"one process: {tokens / alone:,.0f} tokens/s ({machine()['cpu']}, {torch.get_num_threads()} threads)")
    rows = []
    for name in ("fsdp", "ep"):
        against, beside = alone / found[name], found["peer"] / found[name]
        print(
            f"two ranks, {name}: {tokens / found[name]:,.0f} tokens/s, {against:.2f}x one process,"
            f" {beside:.2f}x plain FSDP2 over transformers"
        )
        seconds = {"seconds": found[name], "one_process": alone, "peer": found["peer"]}
        rows.append({"layout": name, **seconds, "ratio_one_process": against, "ratio_peer": beside})
    return rows


def memory(folder: str, large: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    out = f"{folder}/bytes"
    for ranks, layout in ((1, "dp=1"), (2, "dp=2"), (4, "dp=4"), (2, "ep=2"), (4, "ep=4")):
        given = ParallelLayout(dp=ranks, ep=ranks if layout.startswith("ep") else 1, zero=3)
        processes.spawn(memory_of, args=(ranks, f"{folder}/{layout}", large, given, out), nprocs=ranks)
        state, grown = torch.load(out, weights_only=True).tolist()
        rows.append({"layout": layout, "ranks": ranks, "state_bytes": state, "peak_growth_bytes": grown})
        print(
            f"{layout}: {state / 2**20:.0f} MiB of state a rank, {rows[0]['state_bytes'] / state:.2f} times less than"
            f" one process; peak memory grew by {grown / 2**20:.0f} MiB"
        )
    return rows


if __name__ == "__main__":
    main()
