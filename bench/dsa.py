"""Sparse attention (DSA) on a CPU: the time of a prefill over selected keys, beside dense attention, library calls and
transformers; and what training it costs and gains in quality.

    python -m bench.dsa                                     # prefill, about four minutes of one core
    python -m bench.dsa --quality --seeds 0 1               # a small model trained densely and sparsely, five minutes

The model has GLM-5's proportions: the indexer does an eighth of attention's products a pair. All share random weights;
top-k is the config's. Times are processor time of one thread, the least of some. Transformers runs its own GlmMoeDsa
with the attention it takes by default (SDPA under a mask). Library calls are what native kernels replaced: selection in
PyTorch, and attention under a mask.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

import moesaic
from bench.measure import record
from moesaic.data.shards import Shards
from moesaic.kernels import cpu
from moesaic.model.config import Latent
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.pretrain import pretrain
from tests.random_models import save_random, small_config

ROOT = Path(__file__).parents[1]
LENGTHS, TOPK = (1024, 2048, 4096, 8192), (256, 512, 2048)
PEERS_UP_TO = 4096  # their scores of all pairs and heads take gigabytes
SIZES: dict[str, Any] = {
    "q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64,
    "head_dim": 16, "index_n_heads": 8, "index_head_dim": 32, "moe_intermediate_size": 256, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"],
    "max_position_embeddings": 8192,
}  # fmt: skip


def with_topk(model: Model, topk: int) -> Model:
    """The same weights, attending to so many."""
    attention = model.config.attention
    assert isinstance(attention, Latent) and attention.indexer is not None
    config = replace(model.config, attention=replace(attention, indexer=replace(attention.indexer, topk=topk)))
    other = Model(config)
    other.load_state_dict(model.state_dict())
    return other


def least(run: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


@torch.inference_mode()
def prefill(lengths: list[int]) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = small_config("glm_moe_dsa", 512, 512, 1024, 2, (16, 16), index_topk=max(LENGTHS), **SIZES)
        place = save_random(config, Path(folder) / "model")
        dense = moesaic.load(place, dtype="float32")
        models = {topk: with_topk(dense, topk) for topk in TOPK}
        theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).model
    for length in lengths:
        tokens = torch.randint(512, (length,), generator=torch.Generator().manual_seed(0))
        times = 3 if length < 8192 else 1

        def ours(model: Model, length: int = length, tokens: torch.Tensor = tokens) -> Callable[[], object]:
            cache = model.new_cache(length // 16)
            layout = Layout([length], cache=cache, pages=[list(range(length // 16))])
            return lambda: model(tokens, layout)

        ours(dense)()  # pages of the cache are touched, kernels compiled
        plain = least(ours(dense), times)
        for topk in TOPK:
            if topk >= length:
                continue
            row: dict[str, Any] = {
                "tokens": length,
                "topk": topk,
                "dense": plain,
                "selected": least(ours(models[topk]), times),
            }
            if length <= PEERS_UP_TO and topk == TOPK[0]:
                models[topk].ops = cpu
                row["library_calls"] = least(ours(models[topk]), 1)
                models[topk].ops = None
                for layer in theirs.layers:
                    layer.self_attn.indexer.index_topk = topk
                row["transformers"] = least(lambda: theirs(tokens[None], use_cache=False), 1)
            row["times_dense"] = plain / row["selected"]
            rows.append(row)
            print(
                " ".join(
                    f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in row.items()
                ),
                flush=True,
            )
    return rows


QUALITY = [
    *("model.layers=2", "model.context=128", "model.indexer.topk=16", "data.sequence_length=128"),
    *("train.batch_tokens=1024", "train.evaluate_every=0", "train.save_every=1000"),
]


def quality(seed: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """Held-out loss of a dense model, and of it with indexers before and after they learn in a warm-up; of one that was
    sparse from a third of its steps on, with indexers that learn and with such that do not."""
    file = ROOT / "recipes" / "dsa.yaml"
    shutil.rmtree(folder, ignore_errors=True)
    data = folder / "dense" / "data"

    def trained(name: str, *overrides: str) -> Path:
        given = [*QUALITY, f"train.seed={seed}", *overrides]
        if name != "dense":
            given.append(f"train.data={data}")
        if any(option.startswith("train.init") for option in overrides):
            given = [option for option in given if not option.startswith("model.")]
        pretrain(load_recipe(file, given), folder / name, quiet=True)
        return folder / name

    rows: list[dict[str, Any]] = []

    def note(name: str, place: Path, topk: int = 16) -> None:
        held_out = HeldOutLoss(Shards(data), tokens=32_768, sequence_length=128, world=World(torch.device("cpu")))
        rows.append({"seed": seed, "run": name, "loss": held_out(with_topk(moesaic.load(place), topk))})
        print(f"seed {seed}  {name}: {rows[-1]['loss']:.4f}", flush=True)

    dense = trained("dense", f"train.steps={steps}", "train.indexer=null", "model.indexer.topk=128")
    note("dense", dense, 128)
    fresh = folder / "fresh"
    shutil.copytree(dense, fresh)
    config = json.loads((fresh / "config.json").read_text())
    (fresh / "config.json").write_text(json.dumps(config | {"index_topk": 16}))
    note("dense model, fresh indexers", fresh)
    third = steps // 3
    warm = trained("warm", f"train.init={fresh}", f"train.steps={third}", f"train.indexer.warmup_steps={third}")
    note("after the warm-up", warm)
    warmup = f"train.indexer.warmup_steps={third}"
    note("sparse from scratch", trained("scratch", f"train.steps={steps}", warmup))
    untaught = trained("untaught", f"train.steps={steps}", warmup, "train.indexer.weight=1e-12")
    note("sparse from scratch, indexers not taught", untaught)
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options.add_argument("--quality", action="store_true")
    options.add_argument("--steps", type=int, default=240)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--folder", type=Path, default=Path("out/dsa-quality"))
    asked = options.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    if asked.quality:
        rows = [row for seed in asked.seeds for row in quality(seed, asked.steps, asked.folder.resolve())]
        print(record("dsa_quality", rows, load_before=load, steps=asked.steps))
    else:
        print(record("dsa", prefill(asked.lengths), load_before=load))


if __name__ == "__main__":
    main()
