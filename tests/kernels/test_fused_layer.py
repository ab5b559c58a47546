"""A layer, or all layers, in one native call gives the bits its operations give one by one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import moesaic
from moesaic.kernels import Kernels
from moesaic.kernels.native.fused_layers import MAX_STACK_TOKENS
from moesaic.model.context import Routing
from moesaic.model.layout import Layout
from tests.model import oracle

AT_ONCE = [
    "qwen3_moe-normalised-mixed",
    "qwen3_moe-window",
    "glm4_moe-groups",
    "glm4_moe-plain-weights",
    "mixtral-window-tied",
    "llama-llama3-biases",
    "qwen3-window",
]
PIECEMEAL = ["glm4-odd", "deepseek_v3-yarn"]  # norms behind the sublayers, latent attention


class Piecemeal:
    """Kernels that run nothing but single operations."""

    def __init__(self, plain: Kernels) -> None:
        self.plain = plain

    def run_layers(self, *layers: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


@pytest.mark.parametrize("case", AT_ONCE + PIECEMEAL)
def test_same_bits_and_same_experts_as_one_by_one(case, tmp_path, monkeypatch):
    oracle.save(case, tmp_path)
    model = moesaic.load(tmp_path)
    lengths = [30, 7, 19]
    tokens = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]
    steps = [(0, 5), (5, 6), (6, 7), (7, 19), (19, 30)]

    def run(how: str) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        cache = model.new_cache(16, page_size=4)
        for slabs in cache.layers:
            for slab in slabs.values():
                slab.fill_(float("nan"))
        pages = [[9, 2, 7, 0, 1, 12, 14, 15], [5, 3], [4, 6, 8, 10, 11]]
        rows, chosen = [], {}
        with torch.inference_mode():
            for start, stop in steps:
                new = [part[start:stop] for part in tokens]
                cached = [min(start, n) for n in lengths]
                layout = Layout([len(part) for part in new], cached=cached, cache=cache, pages=pages)
                routing = Routing()
                x, context = model.begin(torch.cat(new), layout, routing)
                if how == "operations":
                    context.ops = Piecemeal(context.ops)
                layer = 0
                if how == "stack":
                    x, layer = model.advance(x, context, 0)
                    assert (layer > 1) == (case in AT_ONCE and len(x) <= MAX_STACK_TOKENS)
                for number in range(layer, len(model.layers)):
                    x = model.run_layers(x, context, number, number + 1)
                rows.append(x)
                for layer, routes in routing.choices.items():
                    chosen.setdefault(layer, []).append(routes)
        return torch.cat(rows), {layer: torch.cat(routes) for layer, routes in chosen.items()}

    other, expected = run("operations")
    for how in ("layers", "stack"):
        one, chosen = run(how)
        assert torch.equal(one, other) and not one.isnan().any()
        assert set(chosen) == set(expected)
        assert all(torch.equal(chosen[layer], expected[layer]) for layer in expected)
    assert all((block.stack.prepared["native"] is not None) == (case in AT_ONCE) for block in model.layers)


def test_replaced_weights_are_seen(tmp_path):
    oracle.save("qwen3_moe-window", tmp_path)
    model = moesaic.load(tmp_path)

    def step() -> torch.Tensor:
        cache = model.new_cache(2, page_size=4)
        with torch.inference_mode():
            return model(torch.tensor([5, 6]), Layout([2], cached=[0], cache=cache, pages=[[1]]))

    before = step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 1.5  # other memory, as after a load
    assert not torch.equal(step(), before)
    again = moesaic.load(tmp_path)
    for parameter, old in zip(model.parameters(), again.parameters(), strict=True):
        parameter.data = old.data
    assert torch.equal(step(), before)


def test_a_model_that_has_run_can_be_copied(tmp_path):
    oracle.save("qwen3_moe-window", tmp_path)
    model = moesaic.load(tmp_path)

    def step(model: moesaic.Model) -> torch.Tensor:
        layout = Layout([2], cached=[0], cache=model.new_cache(2, page_size=4), pages=[[1]])
        with torch.inference_mode():
            return model(torch.tensor([5, 6]), layout)

    before = step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(step(other), before)
