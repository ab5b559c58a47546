"""Attention and experts apart give the tokens and the bits of one process."""

from __future__ import annotations

from pathlib import Path

from tests.serve.group.apart_ranks import in_apart
from tests.serve.group.groups import Case, alone, answers, model_directory, some_requests

MODELS = [("qwen3_moe", False), ("glm4_moe", False), ("deepseek_v3", False)]
OPTIONS = {"page_size": 4, "cache_bytes": 2**21}


def test_apart_answers_with_the_bits_of_one_process(tmp_path: Path) -> None:
    asked = some_requests()
    expected = {kind: alone(model_directory(kind, tmp_path / kind, tied), asked, **OPTIONS) for kind, tied in MODELS}
    layouts = ["tp=1 experts=1", "tp=2 experts=2", "tp=2 experts=1", "dp=2 experts=2"]
    which = [(layouts[1], kind) for kind, _ in MODELS] + [
        (layout, "qwen3_moe") for layout in layouts if layout != layouts[1]
    ]
    cases = [Case(layout, tmp_path / kind, answers, asked, **OPTIONS) for layout, kind in which]
    for (layout, kind), found in zip(which, in_apart(cases, tmp_path), strict=True):
        assert found == expected[kind], f"{kind} on {layout}"
