"""IndexCache: what layers that share a selection save in prefill and decode, and what it costs in loss.

    python -m bench.index_cache                 # a minute of one core

Times are of a random model of four layers with GLM-5's proportions and top-k 256, processor time of one thread. Losses
are of a small model of four layers that is trained here sparsely; two layers keep their indexer: chosen greedily, or
evenly; and after the indexers were taught what all the layers they serve look at.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import moesaic
from bench.dsa import QUALITY, ROOT, SIZES, least
from bench.measure import record
from moesaic.compress import calibration
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods.index_cache import IndexCache, shared
from moesaic.data.shards import Shards
from moesaic.model.directory import load
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.parallel.world import World
from moesaic.recipe import load_recipe
from moesaic.train.held_out_loss import HeldOutLoss
from moesaic.train.pretrain import pretrain
from tests.random_models import save_random, small_config

LAYERS, LENGTH, STEPS = 4, 2048, 8


@torch.inference_mode()
def times() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        sizes = {**SIZES, "mlp_layer_types": ["dense"] * (LAYERS - 1) + ["sparse"]}
        config = small_config("glm_moe_dsa", 512, 512, 1024, LAYERS, (16, 16), index_topk=256, **sizes)
        whole = moesaic.load(save_random(config, Path(folder) / "model"), dtype="float32")
    tokens = torch.randint(512, (LENGTH + STEPS,), generator=torch.Generator().manual_seed(0))
    pages = [list(range(LENGTH // 16 + 1))]
    rows: list[dict[str, Any]] = []
    for every in (1, 2, 4):
        model = Model(shared(whole.config, set(range(0, LAYERS, every))))
        model.load_state_dict(whole.state_dict(), strict=False)
        cache = model.new_cache(len(pages[0]))

        def decode(model: Model = model, cache: Any = cache) -> None:
            for done in range(LENGTH, LENGTH + STEPS):
                model(tokens[done : done + 1], Layout([1], cached=[done], cache=cache, pages=pages))

        prefill = least(lambda: model(tokens[:LENGTH], Layout([LENGTH], cache=cache, pages=pages)), 2)
        decode()
        rows.append({"layers_an_indexer": every, "prefill": prefill, "decode_step": least(decode, 3) / STEPS})
        for what in ("prefill", "decode_step"):
            rows[-1][f"{what}_ratio"] = rows[0][what] / rows[-1][what]
        print(rows[-1], flush=True)
    return rows


def losses(folder: Path, steps: int, seed: int) -> list[dict[str, Any]]:
    given = ["model.layers=4", f"train.seed={seed}", f"train.steps={steps}", f"train.indexer.warmup_steps={steps // 3}"]
    shutil.rmtree(folder, ignore_errors=True)
    pretrain(load_recipe(ROOT / "recipes" / "dsa.yaml", [*QUALITY[1:], *given]), folder / "sparse", quiet=True)
    held_out = HeldOutLoss(
        Shards(folder / "sparse" / "data"), tokens=32_768, sequence_length=128, world=World(torch.device("cpu"))
    )
    model = load(folder / "sparse")
    found = {"every layer selects": held_out(model)}
    even = Model(shared(model.config, {0, 2}))
    even.load_state_dict(model.state_dict(), strict=False)
    found["two selections, evenly"] = held_out(even)
    text = folder / "code.txt"  # of a kind that it was trained on
    text.write_text(calibration.unlike_text()[:400_000])
    request = CompressionRequest(text, samples=32, length=128, check_tokens=0, mix=False, force=True)
    for name, taught in (("two selections, greedily", 0), ("and taught for 60 steps", 60)):
        told = compress(folder / "sparse", IndexCache(keep=0.5, steps=taught, batch=4), folder / str(taught), request)
        found[f"{name}: layers {told['plan']['full']}"] = held_out(load(folder / str(taught)))
    for name, loss in found.items():
        print(f"{name}: {loss:.4f}", flush=True)
    return [{"run": name, "loss": loss, "seed": seed} for name, loss in found.items()]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--folder", type=Path, default=Path("out/index-cache"))
    asked = options.parse_args()
    torch.set_num_threads(1)
    load_before = os.getloadavg()[0]
    rows = times()
    for seed in asked.seeds:
        rows += losses(asked.folder.resolve(), asked.steps, seed)
    print(record("index_cache", rows, load_before=load_before, steps=asked.steps))


if __name__ == "__main__":
    main()
