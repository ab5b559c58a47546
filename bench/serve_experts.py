"""Experts that move to where the load is, and experts on ranks of their own: how even is the load, what travels?

    python -m bench.serve_experts          a minute or two; writes bench/results/serve_experts.json

Real processes (gloo) serve a small mixture whose requests say the same few words again and again, so that a few experts
have most tokens. Of every look at the load (each 20 steps): the busiest rank's load over the mean since the last look,
which was measured under the plan of that time. Of ranks apart: bytes and messages on the wires per token and layer of
decoding, beside the formula of docs/serving.md.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.measure import record
from moesaic.kernels.interface import Routes
from moesaic.model.config import Experts
from moesaic.model.directory import save
from moesaic.model.families import read_config
from moesaic.model.transformer import Model
from moesaic.serve.core.request import Sampling
from moesaic.serve.group.apart.ranks import apart_layout, follow_apart, join_apart, open_apart
from moesaic.serve.group.apart.wires import ASSIGNMENT_BYTES, HEAD_BYTES
from moesaic.serve.group.ranks import follow, join, open_engine, serving_layout
from tests.parallel.ranks import start

SHAPE = {
    "model_type": "qwen3_moe", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 32,
    "num_experts_per_tok": 4, "max_position_embeddings": 1024, "initializer_range": 0.2, "norm_topk_prob": True,
}  # fmt: skip
OPTIONS = {"page_size": 16, "cache_bytes": 16 << 20}
STEPS, EVERY = 161, 20


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        save(Model(read_config(SHAPE, "bench")).initialize(), directory)
        rows = [
            run(directory, layout, copies, Path(folder) / f"{number}")
            for number, (layout, copies) in enumerate(
                [("tp=2 ep=2", 0), ("tp=2 ep=2", 4), ("tp=2 ep=4", 2), ("tp=1 experts=2", 4), ("tp=2 experts=2", 0)]
            )
        ]
    for row in rows:
        print(json.dumps(row))
    print(f"wrote {record('serve_experts', rows, steps=STEPS, every=EVERY)}")


def run(directory: Path, layout: str, copies: int, place: Path) -> dict[str, Any]:
    ranks = (apart_layout if "experts" in layout else serving_layout)(layout).devices
    start(_rank, (directory, layout, copies, str(place)), ranks)
    found: dict[str, Any] = json.loads(place.with_suffix(".json").read_text())
    return {"layout": layout, "copies": copies, **found}


def _rank(rank: int, directory: Path, layout: str, copies: int, place: str) -> None:
    torch.set_num_threads(1)
    options = OPTIONS | {"expert_replicas": copies, "rebalance_steps": EVERY}
    apart = "experts" in layout
    engine: Any = None
    if apart:
        ranks = join_apart(apart_layout(layout), rank, f"file:{place}.store")
        if rank:
            return follow_apart(ranks, directory, {"threads": 1}, options)
        engine = open_apart(ranks, directory, {"threads": 1}, options)
    else:
        group = join(serving_layout(layout), rank, f"file:{place}.store")
        if rank:
            return follow(group, directory, {"threads": 1}, options)
        engine = open_engine(group, directory, {"threads": 1}, options)
    found = measured(engine, apart)
    engine.close()
    Path(place).with_suffix(".json").write_text(json.dumps(found))


def measured(engine: Any, apart: bool) -> dict[str, Any]:
    for number in range(8):
        sampling = Sampling(max_tokens=STEPS, temperature=1.0, ignore_eos=True, seed=number)
        engine.add(engine.request([7 + number % 3] * 24, sampling))
    for _ in range(STEPS):
        engine.step()
    rounds = engine.rebalancer.rounds
    found = {
        "first": round(rounds[0].before, 3),
        "later": round(sum(one.before for one in rounds[1:]) / len(rounds[1:]), 3),
        "moves": [one.moves for one in rounds],
    }
    if not apart:
        return found | {"moved_bytes": engine.slots.moved_bytes}
    return found | on_wires(engine)


def on_wires(engine: Any) -> dict[str, Any]:
    """One more step of decoding: what left rank 0 for the experts, and what should have."""
    traffic, away, wires = engine.group.traffic, engine.away, engine.away.wires.values()
    engine.rebalancer = None
    for request in list(engine.scheduler.requests.values()):
        engine.abort(request)
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    for number in range(8):
        engine.add(engine.request([3 + number] * 3, sampling))
    engine.step()
    expected, begin = 0, away.begin

    def counted(x_TD: Any, routes: Routes, layer: int, micro: Any) -> Any:
        nonlocal expected
        if len(x_TD):
            rank_TK = away.holders[layer].choose(routes.experts_TK, micro.turn + layer)
            for rank in away.wires:
                asked_TK = rank_TK == rank
                heads = bool(asked_TK.any()) or micro.askers & (micro.askers - 1) != 0
                expected += heads * HEAD_BYTES + int(asked_TK.sum()) * ASSIGNMENT_BYTES
                expected += int(asked_TK.any(1).sum()) * x_TD.shape[1] * x_TD.element_size()
        return begin(x_TD, routes, layer, micro)

    away.begin = counted
    traffic.clear()
    engine.step()
    layers = sum(isinstance(layer.ffn, Experts) for layer in engine.model.config.layers)
    sent = sum(traffic.bytes[wire.name] for wire in wires)
    return {
        "bytes_per_token_and_layer": sent / 8 / layers,
        "formula": expected / 8 / layers,
        "messages_per_layer": sum(traffic.messages[wire.name] for wire in wires) / layers,
    }


if __name__ == "__main__":
    main()
