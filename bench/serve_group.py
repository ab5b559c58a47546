"""One engine over several ranks on one machine: what each rank holds and sends, and whether the tokens are the same.

    python -m bench.serve_group                    some minutes
    python -m bench.serve_group --tiny             the same program in seconds, to see that it runs

Every row is a worker group of its own processes, one thread each. `peak` is how far the resident size of the largest
rank grew from before it read the model; `sent` is what all ranks together send for each token they compute. Tokens and
log-probabilities of every row must be those of one process: it is checked. Ranks share the machine's cores, so tokens/s
say what a group costs, not what it gains: a group is for models that do not fit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.measure import record
from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.directory import load, save
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.group.rank_state import peak_bytes
from moesaic.serve.group.ranks import follow, join, open_engine, serving_layout

LAYOUTS = ["tp=1", "tp=2", "tp=4", "ep=2", "ep=4", "tp=2 ep=2", "tp=2 ep=4", "tp=4 ep=4"]
SHAPE = dict(layers=6, hidden=512, experts=16, width=512, vocab=8192)
TINY = dict(layers=2, hidden=64, experts=8, width=32, vocab=256)
BATCH, PROMPT, TOKENS = 8, 32, 24


def make(directory: Path, layers: int, hidden: int, experts: int, width: int, vocab: int) -> None:
    """A random mixture with 4 of its experts a token, and weights large enough to differ."""
    attention = GroupedQuery(8, 4, hidden // 8, qk_norm=True)
    layer = Layer(Experts(experts, 4, width))
    config = ModelConfig("qwen3_moe", vocab, hidden, attention, Rope(hidden // 8), (layer,) * layers, context=512)
    save(Model(config).initialize(0), directory)


def answers(engine: Engine) -> dict[str, Any]:
    """Greedy and drawn; and how fast they were decoded."""
    generator = torch.Generator().manual_seed(1)
    vocab = engine.model.config.vocab
    requests = []
    for number in range(BATCH):
        prompt = torch.randint(3, vocab, (PROMPT + number,), generator=generator).tolist()
        sampling = Sampling(max_tokens=TOKENS, temperature=float(number % 2), seed=number, ignore_eos=True)
        requests.append(engine.request(prompt, sampling))
        engine.add(requests[-1])
    while not all(request.decoding for request in requests):
        engine.step()
    start, steps = time.perf_counter(), 0
    while engine.working:
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    found = [[request.tokens, [each.logprob.hex() for each in request.logprobs]] for request in requests]
    return {"answers": found, "steps": steps, "seconds": seconds, "tokens_s": BATCH * steps / seconds}


def run_rank(rank: int, layout: str, directory: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    group = join(serving_layout(layout), rank, f"file:{folder}/store", stall_seconds=120.0)
    options: dict[str, Any] = {"cache_bytes": 64 * 2**20, "max_requests": BATCH}
    before = peak_bytes(group.device)
    (folder / f"{rank}.before").write_text(str(before))
    if rank:
        follow(group, directory, {"threads": 1}, options)
        return
    engine = open_engine(group, directory, {"threads": 1}, options)
    found = answers(engine)
    stats = engine.rank_stats()
    engine.close()
    (folder / "found.json").write_text(json.dumps(found | {"ranks": [vars(each) for each in stats]}))


def measure(layout: str, directory: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder, spawn = Path(name), multiprocessing.get_context("spawn")
        ranks = serving_layout(layout).devices
        running = [spawn.Process(target=run_rank, args=(rank, layout, directory, folder)) for rank in range(ranks)]
        for process in running:
            process.start()
        for process in running:
            process.join()
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        grown = [each["peak"] - int((folder / f"{each['rank']}.before").read_text()) for each in found["ranks"]]
    rows = BATCH * (TOKENS - 1) + sum(PROMPT + number for number in range(BATCH))
    return {
        "layout": layout,
        "ranks": ranks,
        "weights_mib": max(each["weights"] for each in found["ranks"]) / 2**20,
        "cache_mib": max(each["cache"] for each in found["ranks"]) / 2**20,
        "peak_mib": max(grown) / 2**20,
        "sent_kib_per_token": sum(each["sent"] for each in found["ranks"]) / rows / 2**10,
        "tokens_s": found["tokens_s"],
        "answers": found["answers"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    tiny = parser.parse_args().tiny
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "model"
        make(directory, **TINY if tiny else SHAPE)
        one = answers(Engine(load(directory, threads=1), cache_bytes=64 * 2**20, max_requests=BATCH))
        print(f"one process: {one['tokens_s']:.0f} tokens/s")
        rows = []
        for layout in LAYOUTS:
            row = measure(layout, directory)
            row["same"] = row.pop("answers") == one["answers"]
            rows.append(row)
            shown = " ".join(f"{key} {value:.1f}" for key, value in row.items() if isinstance(value, float))
            print(f"{layout:10} {shown} {'same bits' if row['same'] else 'OTHER BITS'}", flush=True)
    assert all(row["same"] for row in rows)
    if not tiny:
        record("serve_group", rows, one_process_tokens_s=one["tokens_s"])


if __name__ == "__main__":
    main()
