"""How wrong serving estimates have been: the relative error of output tokens per second that nine of ten measured runs
stayed within, by kind of device, model and engine. Only runs that no constant was tuned on count.

`python -m bench.plan_serving` prints the table (docs/plan-serving.md); it is written down here because the runs
belong to a package that need not be installed.
"""

from __future__ import annotations

from moesaic.plan.hardware import Device
from moesaic.plan.shape import ModelShape

GENERATIONS = {
    "h100": "hopper", "h200": "hopper", "h800": "hopper", "h20": "hopper",
    "b200": "blackwell", "b300": "blackwell", "gb200": "blackwell", "gb300": "blackwell",
}  # fmt: skip
# Engines of fewer than 30 runs of a kind, and those not among the three, count as `any`. No bound is below 15 %:
# versions of one engine differ by as much.
WITHIN = {
    ("blackwell", "dense", "any"): 0.28,  # 139 runs
    ("blackwell", "dense", "trtllm"): 1.19,  # 80 runs
    ("blackwell", "dense", "vllm"): 0.17,  # 59 runs
    ("blackwell", "latent", "any"): 0.37,  # 402 runs
    ("blackwell", "latent", "sglang"): 0.35,  # 185 runs
    ("blackwell", "latent", "trtllm"): 0.46,  # 146 runs
    ("blackwell", "latent", "vllm"): 0.26,  # 71 runs
    ("blackwell", "mixture", "any"): 0.27,  # 456 runs
    ("blackwell", "mixture", "sglang"): 0.27,  # 145 runs
    ("blackwell", "mixture", "trtllm"): 0.27,  # 57 runs
    ("blackwell", "mixture", "vllm"): 0.28,  # 254 runs
    ("blackwell", "split", "any"): 0.33,  # 114 runs
    ("hopper", "dense", "any"): 0.21,  # 401 runs
    ("hopper", "dense", "sglang"): 0.2,  # 71 runs
    ("hopper", "dense", "trtllm"): 0.2,  # 219 runs
    ("hopper", "dense", "vllm"): 0.28,  # 111 runs
    ("hopper", "latent", "any"): 0.33,  # 114 runs
    ("hopper", "latent", "sglang"): 0.18,  # 46 runs
    ("hopper", "latent", "trtllm"): 0.35,  # 45 runs
    ("hopper", "mixture", "any"): 0.44,  # 294 runs
    ("hopper", "mixture", "sglang"): 0.45,  # 32 runs
    ("hopper", "mixture", "trtllm"): 0.26,  # 112 runs
    ("hopper", "mixture", "vllm"): 0.55,  # 150 runs
    ("hopper", "split", "any"): 1.07,  # 17 runs
}
# Devices without runs of their own have constants like these two generations'; with those of the other one, nine of ten
# runs of either stayed within this.
ELSEWHERE = 0.35


def kind_of(model: ModelShape) -> str:
    if any(layer.attention.latent for layer in model.layers):
        return "latent"  # MLA, in all measured models with experts
    return "mixture" if model.experts else "dense"


def expected_error(model: ModelShape, device: Device, engine: str, split: bool) -> float:
    generation = GENERATIONS.get(device.name, "")
    kind = "split" if split else kind_of(model)
    return WITHIN.get((generation, kind, engine), WITHIN.get((generation, kind, "any"), ELSEWHERE))
