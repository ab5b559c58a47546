"""How wrong serving estimates have been: the relative error of output tokens per second that nine of ten measured runs
stayed within, by kind of device and model. Only runs that no constant was tuned on count.

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
WITHIN = {
    ("blackwell", "dense"): 0.26,  # 139 runs
    ("blackwell", "latent"): 0.35,  # 402 runs
    ("blackwell", "mixture"): 0.27,  # 456 runs
    ("blackwell", "split"): 0.33,  # 114 runs
    ("hopper", "dense"): 0.21,  # 401 runs
    ("hopper", "latent"): 0.33,  # 114 runs
    ("hopper", "mixture"): 0.45,  # 294 runs
    ("hopper", "split"): 1.02,  # 17 runs
}
# Devices without runs of their own have constants like these two generations'; with those of the other one, nine of ten
# runs of either stayed within this.
ELSEWHERE = 0.35


def kind_of(model: ModelShape) -> str:
    if any(layer.attention.latent for layer in model.layers):
        return "latent"  # MLA, in all measured models with experts
    return "mixture" if model.experts else "dense"


def expected_error(model: ModelShape, device: Device, split: bool) -> float:
    """`split`: prefill and decode on devices of their own, of which fewer runs are known."""
    kind = "split" if split else kind_of(model)
    return WITHIN.get((GENERATIONS.get(device.name, ""), kind), ELSEWHERE)
