"""What an engine can do it can do with attention and experts apart, to the bit; and each rank holds what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.compress.compress import CompressionRequest, compress
from moesaic.compress.methods import Compressor
from moesaic.errors import UserError
from moesaic.methods import Method, build
from moesaic.serve.core.drafters.mtp import PredictionLayers
from moesaic.serve.core.drafters.suffix import Suffix
from moesaic.serve.core.engine import Engine
from moesaic.serve.group.apart.ranks import first_plans
from moesaic.serve.group.refusals import check_options
from tests.compress.made import make
from tests.serve.group.apart_ranks import in_apart
from tests.serve.group.groups import Case, answers, model_directory, some_requests
from tests.serve.group.test_experts_moving import skewed_requests
from tests.serve.group.test_features import (
    all_reports,
    drafted,
    in_words,
    make_adapter,
    preempted,
    routed,
    with_adapters,
)
from tests.serve.made import talking_model

OPTIONS = {"page_size": 4, "cache_bytes": 2**21}


def compare(cases: list[Case], folder: Path) -> list[Any]:
    """Every case apart and in one process; what they gave."""
    found = in_apart(cases, folder)
    for case, ours in zip(cases, found, strict=True):
        options = {key: value for key, value in case.options.items() if key not in ("expert_replicas",)}
        engine = Engine(moesaic.load(case.directory, **case.load), **options)
        theirs = json.loads(json.dumps(case.work(engine, *case.args)))
        assert ours == theirs, f"{case.layout} {case.work.__name__} {case.directory.name} {case.options}"
    return found


def test_adapters_drafts_and_grammars(tmp_path: Path) -> None:
    glm, talking = model_directory("glm4_moe", tmp_path / "glm4_moe"), talking_model(tmp_path / "talking")
    modules = {"model.layers.1.self_attn.q_proj": (64, 32), "model.layers.2.mlp.shared_experts.up_proj": (20, 32)}
    adapters = [str(make_adapter(tmp_path / f"glm-{n}", modules, n)) for n in range(2)]
    circles = some_requests(4)
    for one in circles:
        one["prompt"] = one["prompt"][:4] * 6
        one["sampling"]["max_tokens"] = 12
    cases = [
        Case("tp=2 experts=2", glm, with_adapters, adapters, some_requests(8), **OPTIONS),
        Case("tp=2 experts=2", glm, drafted, circles, drafter=routed(Suffix()), **OPTIONS),
        Case("tp=1 experts=2", talking, in_words, ["Answer:", "The number"], expert_replicas=1, **OPTIONS),
    ]
    compare(cases, tmp_path)


def test_quantized_experts_reports_and_a_float8_cache(tmp_path: Path) -> None:
    wish = CompressionRequest(samples=2, length=64, check_tokens=0)
    made = build(Method("rtn", {"bits": 4, "group": 32}), Compressor, "test")  # type: ignore[type-abstract]
    compress(make(tmp_path / "model"), made, tmp_path / "quantized", wish)
    directory = model_directory("qwen3_moe", tmp_path / "qwen3")
    asked = some_requests(8)
    for number, one in enumerate(asked):
        one["sampling"] |= {"prompt_logprobs": 2} if number % 2 else {"record_routes": True}
    page = 3 * 2 * 2 * 8 * 4 * 4  # layers, keys and values, heads, head size, page size, bytes
    cases = [
        Case("tp=2 experts=2", tmp_path / "quantized", answers, some_requests(6, tokens=4), **OPTIONS),
        Case("tp=2 experts=1", directory, all_reports, asked, **OPTIONS),
        Case("dp=2 experts=2", directory, all_reports, asked, **OPTIONS),
        # Without scored prompts: the unfused kernels of such a cache have other bits for a few rows, and how many of a
        # prompt are scored in a step depends on who is beside.
        Case("tp=1 experts=3", directory, answers, some_requests(8), cache_dtype="float8", **OPTIONS),
        Case("tp=1 experts=2", directory, preempted, some_requests(10, tokens=20), page_size=4, cache_bytes=20 * page),
    ]
    compare(cases, tmp_path)


def moved(engine: Any, asked: list[Any]) -> dict[str, Any]:
    found = answers(engine, asked)
    stats = engine.away.stats()
    return {
        "answers": found,
        "rounds": [list(one) for one in engine.rebalancer.rounds],
        "read": sum(one.read for one in stats.values()),
        "held": [one.held for one in stats.values()],
        "ranks": [[one.rank, one.weights] for one in engine.rank_stats()],
    }


def test_experts_move_between_ranks_of_their_own_and_memory_is_what_it_should_be(tmp_path: Path) -> None:
    asked, directory = skewed_requests(), model_directory("qwen3_moe", tmp_path / "qwen3")
    case = Case("tp=2 experts=2", directory, moved, asked, expert_replicas=2, rebalance_steps=5, **OPTIONS)
    (found,) = in_apart([case], tmp_path)
    model = moesaic.load(directory, threads=1)
    assert found["answers"] == answers(Engine(model, **OPTIONS), asked)
    first, *later = found["rounds"]
    moves = sum(one[3] for one in found["rounds"])
    assert first[3] > 0 and sum(one[1] for one in later) / len(later) < first[1]
    assert found["held"] == [18, 18] and 36 < found["read"] <= 36 + moves, "only what changed was read"

    sizes = {name: tensor.numel() * 4 for name, tensor in model.named_parameters()}
    routed = sum(size for name, size in sizes.items() if name.endswith(("gate_up_EGD", "down_EDF")))
    whole = sum(size for name, size in sizes.items() if "norm" in name or "router" in name)
    rest = sum(sizes.values()) - routed - whole
    (_, one), (_, two), (_, three), (_, four) = found["ranks"]
    assert [rank for rank, _ in found["ranks"]] == [0, 1, 2, 3]
    assert one + two == rest + 2 * whole
    assert abs(one - two) <= 2 * 4 * model.config.hidden, "embedding and head have an odd number of rows"
    assert three == four == routed * 6 // 8  # four experts of eight, and two copies


def test_what_cannot_be_apart_is_refused(tmp_path: Path) -> None:
    config = moesaic.load(model_directory("qwen3_moe", tmp_path / "qwen3"), threads=1).config
    with pytest.raises(UserError, match="more ranks than a layer's 8 experts"):
        first_plans(config, 9)
    dense = moesaic.load(model_directory("qwen3", tmp_path / "dense"), threads=1).config
    with pytest.raises(UserError, match="no experts"):
        first_plans(dense, 2)
    with pytest.raises(UserError, match="ranks of their own"):
        check_options({"drafter": PredictionLayers(length=1)})
    assert all([len(own) for own in plan.slots] == [4, 4, 4] for plan in first_plans(config, 3, 1).values())
