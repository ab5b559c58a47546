"""A machine's score: operations are counted as PyTorch's own counter sees them, and the numbers belong together."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moesaic.cli import main
from moesaic.evaluate.suites import SuiteContext, Weights, machine
from moesaic.evaluate.suites.machine import WORKLOAD, Machine
from moesaic.model.config import Dense, Experts, GroupedQuery, Layer, ModelConfig, Rope
from moesaic.model.flops import Chunk, forward_flops, training_flops
from moesaic.model.layout import Layout
from moesaic.model.transformer import Model
from moesaic.plan.own_models import from_config

SMALL = ModelConfig(
    family="qwen3_moe",
    vocab=96,
    hidden=24,
    attention=GroupedQuery(heads=4, kv_heads=2, head_size=8, qk_norm=True),
    rope=Rope(size=8),
    layers=(
        Layer(Dense(40)),
        Layer(Experts(count=6, per_token=2, hidden=20)),
        Layer(Experts(count=4, per_token=3, hidden=12, shared_hidden=28)),
        Layer(Experts(count=4, per_token=1, hidden=12, shared_hidden=16, residual=True)),
    ),
    context=64,
)


def plural(model: Model, lengths: list[int], rows: slice | list[int] = slice(None), backward: bool = False) -> int:
    tokens_T = torch.arange(sum(lengths)) % model.config.vocab
    with FlopCounterMode(display=False) as counter:
        logits_TV = model.logits_at(model(tokens_T, Layout(lengths)), rows)  # type: ignore[arg-type]
        if backward:
            logits_TV.logsumexp(-1).sum().backward()
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL, mode="reference").initialize(0)


def unseen(config: ModelConfig, lengths: list[int]) -> int:
    """What the plain implementation computes for pairs that do not see each other, and masks."""
    shape = config.attention
    assert isinstance(shape, GroupedQuery)
    pairs = sum(length**2 - length * (length + 1) // 2 for length in lengths)
    return len(config.layers) * 4 * shape.heads * shape.head_size * pairs


@pytest.mark.parametrize("lengths", [[2], [3] * 7, [5], [16, 2, 9]])
def test_operations_are_those_that_pytorch_counts(model: Model, lengths: list[int]) -> None:
    chunks = [Chunk(length) for length in lengths]
    masked = unseen(SMALL, lengths)
    assert forward_flops(SMALL, chunks) == plural(model, lengths) - masked
    assert forward_flops(SMALL, chunks, logits=1) == plural(model, lengths, [0]) - masked
    assert 3 * forward_flops(SMALL, chunks) == plural(model, lengths, backward=True) - 3 * masked


def test_a_token_after_others_counts_what_it_sees(model: Model) -> None:
    """Token by token it is as much as all at once."""
    once = forward_flops(SMALL, [Chunk(20)])
    assert once == sum(forward_flops(SMALL, [Chunk(1, place)]) for place in range(20))
    assert once == forward_flops(SMALL, [Chunk(12)]) + forward_flops(SMALL, [Chunk(8, 12)])
    cache = model.new_cache(4)
    with torch.inference_mode():
        model(torch.arange(20), Layout([20], cache=cache, pages=[[0, 1]]))
        with FlopCounterMode(display=False) as counter:
            layout = Layout([1], cached=[20], cache=cache, pages=[[0, 1]])
            model.logits_at(model(torch.tensor([3]), layout))
    assert counter.get_total_flops() == forward_flops(SMALL, [Chunk(1, 20)])


def test_a_window_hides_the_rest() -> None:
    near = replace(SMALL, layers=tuple(replace(layer, window=4) for layer in SMALL.layers))
    for chunk in (Chunk(3), Chunk(20), Chunk(5, 9), Chunk(1, 2)):
        seen = sum(min(4, chunk.cached + place) for place in range(1, chunk.new + 1))
        wide = sum(chunk.cached + place for place in range(1, chunk.new + 1))
        fewer = len(SMALL.layers) * 4 * 4 * 8 * (wide - seen)
        assert forward_flops(near, [chunk]) == forward_flops(SMALL, [chunk]) - fewer


def test_the_workload_is_what_its_description_says() -> None:
    model = Model(WORKLOAD)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(12.7e6, rel=0.01)
    # The planner, which knows sizes alone, counts norms too: six for each parameter that a token passes.
    planned = from_config(WORKLOAD, "workload").training_flops(1024, 256)
    assert training_flops(WORKLOAD, [256] * 4) == pytest.approx(planned, rel=0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "WORKLOAD", replace(SMALL, context=1024))
    monkeypatch.setattr(machine, "LONG_ENOUGH", 0.0)


def test_the_numbers_belong_together(quick: None) -> None:
    found = Machine(seconds=0.01).run(None, SuiteContext(weights=Weights(device="cpu", threads=1)))
    config = machine.WORKLOAD
    speeds = []
    for name in ("read", "write", "write_16", "train"):
        flops, tokens = found[f"{name}_operations_per_second"], found[f"{name}_tokens_per_second"]
        assert flops > 0 and tokens > 0
        speeds.append(flops / 1e9)
        if name == "read":
            wanted = forward_flops(config, [Chunk(512)], logits=1) / 512
        elif name == "train":
            wanted = 3 * forward_flops(config, [Chunk(256)]) / 256
        elif name == "write":
            wanted = sum(forward_flops(config, [Chunk(1, 63 + place)]) for place in range(1, 64)) / 63
        else:
            continue
        assert flops / tokens == pytest.approx(wanted)
    assert found["regulator"] == pytest.approx(-math.log(max(found["error"], 0.01)))
    assert found["score"] == pytest.approx(math.prod(speeds) ** 0.25 * found["regulator"])
    assert found["dtype"] == "float32" and found["threads"] == 1 and "cpu" in found["device"]


def test_what_is_not_learned_scores_nothing(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LEARNING_STEPS", 0)
    found = Machine(seconds=0.01).run(None, SuiteContext(weights=Weights(device="cpu", threads=1)))
    assert found["error"] > 0.9 and found["score"] < 0.11 * found["score"] / found["regulator"]


def test_the_command_needs_no_model(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", "--suite", "machine", "seconds=0.01", "--device", "cpu", "--threads", "1"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["directory"] == "this machine" and told["workload"] == machine.VERSION and told["threads"] == 1
    assert main(words) == 0 and "machine: score" in capsys.readouterr().out
    for wrong in (
        ["out/model"],
        ["seconds=0"],
        ["--dtype", "int8"],
        ["--device", "warp"],
        ["--threads", "9999"],
        ["--threads", "0"],
    ):
        assert main([*words, *wrong]) == 2
    assert main(["evaluate", "--suite", "machine,tasks"]) == 2 and main(["evaluate", "--suite", "tasks"]) == 2
    assert "MODEL" in capsys.readouterr().err
