"""What every row of `bench/serve_offload.py` does: decode with one stream and with a batch, and say what came of it."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moesaic.model.config import Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.transformer import Model
from moesaic.serve.core.engine import Engine
from moesaic.serve.core.request import Sampling
from moesaic.serve.offload.experts import OffloadedExperts

GIB = 2**30


def config_of(shape: dict[str, Any], dtype: str) -> ModelConfig:
    heads, kv_heads, size = shape["heads"]
    return ModelConfig(
        family="qwen3_moe",
        vocab=shape["vocab"],
        hidden=shape["hidden"],
        attention=GroupedQuery(heads, kv_heads, size, qk_norm=True),
        rope=Rope(size, theta=1e6),
        layers=tuple(
            Layer(Experts(shape["experts"], shape["per_token"], shape["width"])) for _ in range(shape["layers"])
        ),
        context=1024,
        dtype=dtype,  # type: ignore[arg-type]
    )


class Decoding:
    """An engine and prompts for it, which decode again and again."""

    def __init__(self, model: Model, options: argparse.Namespace, batch: int) -> None:
        gc.unfreeze()
        gc.collect()  # what an earlier engine held
        self.engine = Engine(model, cache_bytes=int(options.cache_gib * GIB), max_requests=batch, seed=0)
        generator, vocab = torch.Generator().manual_seed(7), model.config.vocab
        self.prompts = [torch.randint(vocab, (options.prompt,), generator=generator).tolist() for _ in range(batch)]
        if batch == 1:
            self.engine.warm_up()
        self.run(2)  # compile, fill caches

    def run(self, count: int) -> float:
        """Tokens a second after the last prompt was read."""
        sampling = Sampling(max_tokens=count, temperature=1.0, ignore_eos=True)
        requests = [self.engine.request(prompt, sampling) for prompt in self.prompts]
        self.engine.complete(requests)
        first, last = max(r.first_token for r in requests), max(r.last_token for r in requests)  # type: ignore[type-var]
        return len(requests) * (count - 1) / max(last - first, 1e-9)  # type: ignore[operator]


def greedy_tokens(model: Model) -> list[list[int]]:
    prompts = [[(7 * n + 11 * at) % model.config.vocab for at in range(5 + 9 * n)] for n in range(4)]
    engine = Engine(model, cache_bytes=1 << 27, max_requests=4, seed=0)
    done = engine.generate(prompts, max_tokens=12, temperature=0.0, ignore_eos=True)
    return [list(one.tokens) for one in done]


KINDS = ("one", "batch")


def sizes(options: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """Sequences, and tokens that each generates."""
    return {"one": (1, options.tokens), "batch": (options.batch, options.batch_tokens)}


def counted(model: Model) -> dict[str, float]:
    return dict(vars(model.ops.counts)) if isinstance(model.ops, OffloadedExperts) else {}


def fetched(name: str, before: dict[str, float], after: dict[str, float], tokens: int) -> dict[str, Any]:
    """Rates of hits and right predictions, and bytes a generated token."""
    if not after:
        return {}
    new = {key: value - before[key] for key, value in after.items()}
    return {
        f"{name}_hit_rate": round(new["hits"] / max(1, new["wanted"]), 3),
        f"{name}_predicted": round(new["predicted"] / max(1, new["predictable"]), 3),
        f"{name}_fetched_mib_per_token": round(new["bytes"] / 2**20 / tokens, 2),
    }


def measured(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"greedy_tokens": greedy_tokens(model)}
    for name, (batch, tokens) in sizes(options).items():
        decoding = Decoding(model, options, batch)
        before = counted(model)
        rates = [decoding.run(tokens) for _ in range(options.rounds)]
        found[f"{name}_tokens_per_second"] = round(max(rates), 2)
        found |= fetched(name, before, counted(model), options.rounds * batch * tokens)
    return found


def resident(field: str = "VmHWM") -> int:
    """Bytes of this process's memory, by default the most there were."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def report(rows: Sequence[dict[str, Any]]) -> None:
    """The newest row, beside `memory`."""
    row = rows[-1]
    base = next((one for one in rows if one["row"] == "memory" and "greedy_tokens" in one), None)
    if "greedy_tokens" not in row:
        print(json.dumps(row), flush=True)
        return
    if base is not None and row["row"] != "large":
        row["same_tokens"] = row["greedy_tokens"] == base["greedy_tokens"]
        for kind in KINDS:
            ratio = row[f"{kind}_tokens_per_second"] / base[f"{kind}_tokens_per_second"]
            row.setdefault(f"{kind}_ratio", round(ratio, 3))
    print(json.dumps({key: value for key, value in row.items() if key != "greedy_tokens"}), flush=True)
