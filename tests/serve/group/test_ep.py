"""Experts on ranks, inside tensor ranks and between data-parallel ones: the tokens and the bits of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moesaic.serve.group.engine import GroupEngine
from tests.serve.group.groups import Case, alone, answers, in_groups, model_directory, some_requests

OPTIONS = {"page_size": 4, "cache_bytes": 2**21}
LAYOUTS = ["tp=2 ep=2", "ep=2", "tp=2 ep=4", "tp=2 dp=2", "tp=4 ep=2"]


def shared_out(engine: GroupEngine, asked: list[Any]) -> Any:
    """Answers, one request alone (a step without rows for the other data-parallel ranks), and who got which request."""
    found = answers(engine, asked)
    found.append(answers(engine, asked[:1])[0])
    opened = getattr(engine.page_pool, "open", [len(found)])
    assert engine.page_pool.in_use == 0
    return found, opened, {str(layer): counts for layer, counts in engine.experts.by_layer().items()}


def test_experts_on_ranks_answer_with_the_bits_of_one_process(tmp_path: Path) -> None:
    asked = some_requests()
    for one in asked[::2]:
        one["sampling"]["record_routes"] = True
    cases, expected = [], []
    for kind, load in (("qwen3_moe", {}), ("deepseek_v3", {"mode": "invariant"}), ("glm4_moe", {})):
        directory = model_directory(kind, tmp_path / kind)
        one = alone(directory, asked, load, **OPTIONS)
        for layout in LAYOUTS if kind == "qwen3_moe" else LAYOUTS[:3]:
            cases.append(Case(layout, directory, shared_out, asked, load=load, **OPTIONS))
            expected.append([*one, one[0]])
    for case, (found, opened, counts), theirs in zip(cases, in_groups(cases, tmp_path), expected, strict=True):
        assert found == theirs, f"{case.directory.name} {case.layout}"
        if "dp" in case.layout or case.layout in ("ep=2", "tp=2 ep=4"):
            assert len(opened) == 2 and min(opened) > 0, case.layout  # both had requests
        assert counts and all(sum(layer) > 0 for layer in counts.values())
