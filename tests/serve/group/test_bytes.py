"""What ranks send in a decode step is what the formula says, to the byte and to the message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import moesaic
from moesaic.model.config import Experts
from moesaic.parallel.layout import ParallelLayout
from moesaic.serve.group.engine import GroupEngine
from moesaic.serve.group.shares import spans
from moesaic.serve.group.step_array import FIRST
from moesaic.serve.group.traffic import StepRows, messages_per_layer, step_traffic
from tests.serve.group.groups import Case, in_groups, model_directory, new_request, some_requests

LAYOUTS = ["tp=2", "ep=2", "tp=2 ep=2", "tp=2 ep=4", "tp=4"]


def step_rows(engine: GroupEngine, pieces: list[Any], choices: dict[int, torch.Tensor], rank: int) -> StepRows:
    """By the definitions of `StepRows`, assignment by assignment."""
    config, layout = engine.model.config, engine.group.layout
    tp, ep = layout.tp, layout.ep
    rows = [(piece.dp, token) for piece in pieces for token in piece.tokens]
    own = [token for dp, token in rows if dp == rank // tp]
    first, last = spans(config.vocab, tp)[rank % tp]
    owners = []  # of all rows, data-parallel ranks one after the other
    for dp in range(layout.dp):
        count = sum(at == dp for at, _ in rows)
        for tensor, (start, stop) in enumerate(spans(count, tp)):
            owners += [dp * tp + tensor] * (stop - start)
    results = dispatched = 0
    for layer, chosen_TK in choices.items():
        ffn = config.layers[layer].ffn
        assert isinstance(ffn, Experts)
        for owner, chosen in zip(owners, chosen_TK.tolist(), strict=True):
            for expert in chosen:
                holder = owner // ep * ep + expert // (ffn.count // ep)
                results += holder == rank != owner
                dispatched += owner == rank and holder // tp != rank // tp
    return StepRows(
        rows=len(own),
        embedded=sum(first <= token < last for token in own),
        owned=owners.count(rank),
        wanted=sum(len(piece.wanted) for piece in pieces if piece.dp == rank // tp),
        results=results,
        dispatched=dispatched,
    )


def decode_step(engine: GroupEngine, asked: list[Any]) -> Any:
    """One decode step of all requests: what was measured and what the formula says, for every rank."""
    for one in asked:
        engine.add(new_request(engine, one))
    while not all(request.decoding for request in engine.scheduler.requests.values()):
        engine.step()
    seen: dict[str, Any] = {}
    run = engine.state.step.run

    def watched(pieces: Any, adapters: Any) -> Any:
        result = run(pieces, adapters)
        seen.update(pieces=pieces, choices=result.routing.choices)
        return result

    engine.state.step.run = watched  # type: ignore[method-assign]
    before = engine.rank_stats()
    engine.group.traffic.clear()
    engine.step()
    kinds = {kind: [engine.group.traffic.messages[kind], size] for kind, size in engine.group.traffic.bytes.items()}
    after = engine.rank_stats()
    config, layout = engine.model.config, engine.group.layout
    expected = [
        step_traffic(config, layout, rank, step_rows(engine, seen["pieces"], seen["choices"], rank))
        for rank in range(layout.devices)
    ]
    others = [[b.messages - a.messages, b.sent - a.sent] for a, b in zip(before[1:], after[1:], strict=True)]
    ours = [[sum(n for n, _ in each.values()), sum(size for _, size in each.values())] for each in expected[1:]]
    layers = [
        messages_per_layer(config, layout, n) * any(p.dp == 0 for p in seen["pieces"])
        for n in range(len(config.layers))
    ]
    return {"kinds": kinds, "expected": expected[0], "others": others, "ours": ours, "layers": layers}


def test_bytes_and_messages_of_a_decode_step(tmp_path: Path) -> None:
    asked = some_requests(7, tokens=9)
    for one in asked:
        one["sampling"]["max_tokens"] = 60
        one["prompt"] = one["prompt"][:20]
    cases = []
    for kind in ("qwen3_moe", "deepseek_v3", "glm4_moe"):
        directory = model_directory(kind, tmp_path / kind)
        for layout in LAYOUTS if kind == "qwen3_moe" else LAYOUTS[:4]:
            cases.append(Case(layout, directory, decode_step, asked, page_size=4, cache_bytes=2**21))
    for case, found in zip(cases, in_groups(cases, tmp_path), strict=True):
        where = f"{case.directory.name} {case.layout}"
        assert found["kinds"] == found["expected"], where
        assert found["others"] == found["ours"], where
        once = {"embed", "step", "logits", "routes"}  # a step, not a layer
        assert sum(n for kind, (n, _) in found["kinds"].items() if kind not in once) == sum(found["layers"]), where
        assert found["kinds"]["step"] == [1, FIRST * 8 * len(found["others"])]


def test_the_formula_at_a_known_size(tmp_path: Path) -> None:
    """GLM-4.5's decode step by hand: 8 rows, tp=2, bfloat16, one layer of each kind."""
    directory = model_directory("glm4_moe", tmp_path / "model")
    config = moesaic.load(directory).config  # hidden 32, heads 8 x 8, dense 50, experts 8 of 20 (2 a token), shared 20
    sent = step_traffic(config, ParallelLayout(tp=2), 1, StepRows(rows=8, embedded=3, owned=4, wanted=8), itemsize=2)
    assert sent["out"] == (3, 3 * 8 * 32 * 2)
    assert sent["down"] == (3, 8 * (25 + 10 + 10) * 2)
    assert sent["expert hidden"] == (2, 2 * 8 * 2 * 10 * 2)
    assert sent["stream"] == (8, 8 * 8 * 16 * 2)  # behind attention 3, dense and shared 3, experts 2
    assert sent["embed"] == (1, 3 * 32 * 2) and sent["logits"] == (1, 8 * 49 * 2)
